"""The messages and channels of gpt-oss: https://cookbook.openai.com/articles/openai-harmony."""

from __future__ import annotations

import re

from jackfield.parsing.bodies import read_arguments
from jackfield.parsing.calling import Calling
from jackfield.parsing.parts import Content, Reasoning
from jackfield.parsing.reader import Malformed, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
FUNCTIONS = "functions."

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?\s*(?:to=(?P<early>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w+))?\s*(?:to=(?P<to>[^\s<]+))?\s*"
    r"(?:<\|constrain\|>)?\s*\w*\s*"
)
_LONGEST_HEADER = 400  # characters
_OVER = (END, CALL, RETURN, START)


class HarmonyParser(Calling):
    """Reads what follows `<|start|>assistant`: messages, each for a channel or a function.

    `analysis` is thought, `final` and `commentary` are content; what is for another recipient than
    the request's functions is content as it stands, marks and all.
    """

    def _run(self) -> Reading[None]:
        reader = self._reader
        first = True
        while not self.done:
            reader.forget()
            yield from reader.space()
            if not (yield from reader.peek()):
                return
            self._given = 0
            if not (yield from self._begins(first=first)):
                yield from self._stream(Content, START, CHANNEL)
            else:
                yield from self._message()
            first = False

    def _begins(self, *, first: bool) -> Reading[bool]:
        """Whether a header comes next; the place is not behind it."""
        reader = self._reader
        place = reader.at
        for mark in (START, CHANNEL, *(("to=",) if first else ())):
            if (yield from reader.sees(mark)):
                reader.at = place
                return True
        reader.at = 0
        return False

    def _message(self) -> Reading[None]:
        """One message, up to the mark that ends it, which nobody is told of."""
        reader = self._reader
        start = reader.at
        kind: type[Content | Reasoning] = Content
        try:
            kind = yield from self._opened()
        except Malformed:
            if self._open:
                self.end(whole=False)
            else:  # told as it stands; its first mark is not looked at again
                marks = [mark for mark in (START, CHANNEL) if reader.text.startswith(mark, start)]
                reader.at = start + len("".join(marks))
                self._say(Content(reader.text[: reader.at]))
        if not self.done and (yield from self._stream(kind, *_OVER)):
            yield from reader.space()
            for mark in (END, CALL, RETURN):
                if (yield from reader.sees(mark)):
                    break

    def _opened(self) -> Reading[type[Content | Reasoning]]:
        """Read the header, and a call as a whole; what else the message has, and as what."""
        header = yield from self._header()
        recipient = header["early"] or header["to"]
        if recipient is None:
            return Reasoning if header["channel"] == "analysis" else Content
        name = recipient.removeprefix(FUNCTIONS)
        if not recipient.startswith(FUNCTIONS) or name not in self.tools:
            raise Malformed
        yield from self._reader.space()
        yield from read_arguments(self._reader, self, name)
        yield from self._reader.space()
        return Content

    def _header(self) -> Reading[re.Match[str]]:
        reader = self._reader
        start = reader.at
        while (end := reader.text.find(MESSAGE, start)) < 0:
            if reader.ended or len(reader.text) - start > _LONGEST_HEADER:
                raise Malformed
            yield
        header = _HEADER.fullmatch(reader.text[start:end])
        if header is None or end - start > _LONGEST_HEADER:
            raise Malformed
        reader.at = end + len(MESSAGE)
        return header
