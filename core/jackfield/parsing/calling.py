"""What parsers of every form share: streaming text, and calls of the request's tools."""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Mapping

from jackfield.parsing.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from jackfield.parsing.reader import SPACE, Incremental, Reading
from jackfield.parsing.tools import Tool
from jackfield.requests.detokenize import overlap

_LETTERS = string.ascii_letters + string.digits


def id_of_call(text: str, index: int) -> str:
    """The id of the call at `index` in the text of the name `text`.

    Nine letters and digits, as templates of Mistral take no other.
    """
    number = int.from_bytes(hashlib.sha256(f"{text}/{index}".encode()).digest())
    return "".join(_LETTERS[number // 62**place % 62] for place in range(9))


class Calling(Incremental):
    """A parser that can tell of calls: of `tools`, one at most where they are not `parallel`.

    `done`: the one call is over, and whatever else the model says is not read. Ids of calls are
    made of `name`, which no other text of a conversation may have.
    """

    def __init__(self, tools: Mapping[str, Tool], *, parallel: bool) -> None:
        super().__init__()
        self.tools = tools
        self.done = False
        self.name = secrets.token_hex(16)
        self._parallel = parallel
        self._calls = 0  # that are over
        self._open = False  # a call has begun and is not over
        self._given = 0  # the text before is told

    def begin(self, name: str) -> None:
        self._say(CallBegun(self._calls, id_of_call(self.name, self._calls), name))
        self._open = True

    def arguments(self, text: str) -> None:
        self._say(CallArguments(self._calls, text))

    def end(self, *, whole: bool = True) -> None:
        self._say(CallEnded(self._calls, whole))
        self._calls += 1
        self._open = False
        self._given = self._reader.at
        self.done = not self._parallel

    def _stream(self, kind: type[Content | Reasoning], *ends: str) -> Reading[bool]:
        """Tell the text up to the first of `ends`, less the white space before it.

        That comes next then, and then the end. False: there was none, and the text is over.
        """
        reader = self._reader
        while True:
            reader.forget()
            text = reader.text
            places = [at for end in ends if (at := text.find(end)) >= 0]
            sure = len(text)
            if places:
                sure = min(places)
            elif not reader.ended:
                sure -= max((overlap(text, end) for end in ends), default=0)
            if places or not (reader.ended or not ends):
                sure = len(text[:sure].rstrip(SPACE))
            self._say(kind(text[:sure]))
            reader.at = sure
            if places or reader.ended:
                return bool(places)
            yield
