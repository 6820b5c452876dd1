"""Parses the text of a model: content, thoughts, and calls in one of the frames."""

from __future__ import annotations

from collections.abc import Mapping

from jackfield.parsing.bodies import BODIES
from jackfield.parsing.calling import Calling
from jackfield.parsing.frames import Frame
from jackfield.parsing.parts import Content, Reasoning
from jackfield.parsing.reader import Malformed, Reading
from jackfield.parsing.tools import Tool


class FramedParser(Calling):
    """Reads a thought between two marks, which stands first, and calls in a `Frame`.

    What looks like a call and is none is content. White space between calls, and before and after
    them, is not.
    """

    def __init__(
        self,
        frame: Frame | None,
        thought: tuple[str, str] | None,
        tools: Mapping[str, Tool],
        *,
        parallel: bool = True,
        starts_in_reasoning: bool = False,
    ) -> None:
        super().__init__(tools, parallel=parallel)
        self._frame = frame if tools else None
        self._thought = thought
        self._thinks = starts_in_reasoning
        self._tried = 0  # a mark before was looked at, and is not again
        self._after_call = False

    def _run(self) -> Reading[None]:
        if self._thought is not None:
            yield from self._reasoning(*self._thought)
        frame = self._frame
        if frame is None:
            yield from self._stream(Content)
            return
        if frame.bare:
            yield from self._at_the_start(frame)
        while not self.done and (yield from self._content(frame.mark)):
            self._given = self._tried = self._reader.at
            yield from self._attempt(frame, marked=True)

    def _reasoning(self, opens: str, closes: str) -> Reading[None]:
        reader = self._reader
        yield from reader.space()
        if not ((yield from reader.sees(opens)) or self._thinks):
            reader.at = 0
            return
        yield from reader.space()
        if (yield from self._stream(Reasoning, closes)):
            yield from reader.space()
            yield from reader.expect(closes)
            while (yield from reader.sees("\n")):
                pass

    def _at_the_start(self, frame: Frame) -> Reading[None]:
        """Calls that nothing opens are told from text by what they are alone."""
        reader = self._reader
        reader.forget()
        self._given = self._tried = 0
        yield from reader.space()
        begins = frame.first.strip() or "{"
        looks = yield from reader.sees(begins)
        reader.at = 0
        if looks:
            yield from self._attempt(frame, marked=False)

    def _content(self, mark: str) -> Reading[bool]:
        """Tell what is no call; whether white space and the mark of calls come next."""
        reader = self._reader
        reader.forget()
        if self._after_call:
            space = yield from reader.space()
            if not (yield from reader.peek()):
                return False
            if (yield from reader.sees(mark)):
                reader.at = len(space)
                return True
            reader.at = 0
        return (yield from self._stream(Content, mark))

    def _attempt(self, frame: Frame, *, marked: bool) -> Reading[None]:
        """Read calls; what turns out to be none is told as content."""
        reader = self._reader
        self._after_call = False
        try:
            yield from self._section(frame, marked=marked)
            self._after_call = True
        except Malformed:
            if self._open:  # too late for its beginning
                self.end(whole=False)
            again = max(self._given, self._tried)
            self._say(Content(reader.text[self._given : again]))
            reader.at = again

    def _section(self, frame: Frame, *, marked: bool) -> Reading[None]:
        reader = self._reader
        yield from reader.space()
        if marked and frame.opens:
            yield from self._mark(frame.opens)
        yield from reader.space()
        yield from reader.expect(frame.first.strip())
        while True:
            yield from reader.space()
            if frame.call_opens:
                yield from self._mark(frame.call_opens)
            yield from reader.space()
            yield from self._call(frame)
            if self.done or not (yield from self._goes_on(frame)):
                reader.at = self._given
                return

    def _mark(self, mark: str) -> Reading[None]:
        yield from self._reader.expect(mark.strip())
        self._tried = self._reader.at

    def _call(self, frame: Frame) -> Reading[None]:
        """One call, and what closes it, if that is there."""
        reader, before = self._reader, self._calls
        try:
            yield from BODIES[frame.body](reader, self, frame)
        except Malformed:
            if self._calls == before:
                raise
            reader.at = self._given  # its arguments were whole
        self._given = reader.at
        yield from reader.space()
        if (yield from reader.sees(frame.call_closes.strip())):
            self._given = reader.at
        reader.at = self._given

    def _goes_on(self, frame: Frame) -> Reading[bool]:
        """Whether another call follows."""
        reader = self._reader
        yield from reader.space()
        ends = [mark for mark in (frame.last.strip(), frame.closes.strip()) if mark]
        for n, mark in enumerate(ends):
            if not (yield from reader.sees(mark)):
                if n:
                    return False
                break
            self._given = reader.at
            yield from reader.space()
        else:
            if ends:
                return False
        if between := frame.between.strip():
            return (yield from reader.sees(between))
        if frame.call_opens and (yield from reader.sees(frame.call_opens.strip())):
            reader.at -= len(frame.call_opens.strip())
            return True
        return False
