"""Reads a text that comes in pieces: a parser is a generator that waits for more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from jackfield.parsing.parts import Part, merged

T = TypeVar("T")
#: Reads, and returns a T; each `yield` waits for the next piece.
Reading = Generator[None, None, T]

DEEPEST = 64  # lists and objects inside one another
_LONGEST_NUMBER = 400  # characters; Python reads no number of thousands

SPACE = " \t\r\n"  # and no other: what is held back must be what is skipped
_SPACE = re.compile(f"[{SPACE}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")


class Malformed(Exception):  # noqa: N818 - what is read is no call, which is no error of anybody's
    """What is read is not what it looked like."""


class Reader:
    """A text as far as it is there, and the place in it. `ended`: nothing more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Drop what is behind the place; whoever remembers a place must not call it."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def sees(self, literal: str) -> Reading[bool]:
        """Whether the text goes on with `literal`, which is then behind the place."""
        while not self.text.startswith(literal, self.at):
            if self.ended or not literal.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Go behind `literal`. Raises Malformed."""
        if not (yield from self.sees(literal)):
            raise Malformed

    def run(self, pattern: re.Pattern[str], most: int = 1 << 30) -> Reading[str]:
        """All characters from here on that `pattern`, a class of them with a `+`, matches."""
        start = self.at
        while True:
            match = pattern.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at - start > most:
                raise Malformed
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def space(self) -> Reading[str]:
        """Go behind white space."""
        return (yield from self.run(_SPACE))

    def until(self, literal: str) -> Reading[str]:
        """The text before `literal`, which is then behind the place. Raises Malformed."""
        looked = self.at
        while (found := self.text.find(literal, looked)) < 0:
            if self.ended:
                raise Malformed
            looked = max(self.at, len(self.text) - len(literal) + 1)
            yield
        start, self.at = self.at, found + len(literal)
        return self.text[start:found]


def json_value(reader: Reader, out: Callable[[str], Any], depth: int = 0) -> Reading[None]:
    """Go behind one value of JSON, and hand its text to `out` in pieces. Raises Malformed.

    A control character in a string, which models write and JSON has not, becomes an escape.
    """
    first = yield from reader.peek()
    if depth > DEEPEST:
        raise Malformed
    if first == '"':
        yield from json_string(reader, out)
    elif first in ("{", "["):
        yield from _json_container(reader, out, depth)
    elif first in ("t", "f", "n"):
        word = {"t": "true", "f": "false", "n": "null"}[first]
        yield from reader.expect(word)
        out(word)
    else:
        number = yield from reader.run(_DIGITS, _LONGEST_NUMBER)
        if not _NUMBER.fullmatch(number):
            reader.at -= len(number)
            raise Malformed
        out(number)


def json_string(reader: Reader, out: Callable[[str], Any]) -> Reading[None]:
    """Go behind one string of JSON, as `json_value` does."""
    yield from reader.expect('"')
    out('"')
    while (char := (yield from reader.peek())) != '"':
        if match := _PLAIN.match(reader.text, reader.at):
            reader.at = match.end()
            out(match[0])
        elif char == "\\":
            out((yield from _escape(reader)))
        elif char:
            reader.at += 1
            out(json.dumps(char)[1:-1])
        else:
            raise Malformed
    reader.at += 1
    out('"')


def _escape(reader: Reader) -> Reading[str]:
    start = reader.at
    reader.at += 1
    kind = yield from reader.peek()
    reader.at += len(kind)
    if kind == "u":
        while len(reader.text) < reader.at + 4 and not reader.ended:
            yield
        reader.at += 4
    if kind not in tuple('"\\/bfnrtu') or (
        kind == "u" and not _HEX.fullmatch(reader.text[start + 2 : start + 6])
    ):
        reader.at = start
        raise Malformed
    return reader.text[start : reader.at]


def _json_container(reader: Reader, out: Callable[[str], Any], depth: int) -> Reading[None]:
    opening = yield from reader.peek()
    closing = "}" if opening == "{" else "]"
    reader.at += 1
    out(opening + (yield from reader.space()))
    if (yield from reader.sees(closing)):
        out(closing)
        return
    while True:
        if opening == "{":
            yield from json_string(reader, out)
            out((yield from reader.space()))
            yield from reader.expect(":")
            out(":" + (yield from reader.space()))
        yield from json_value(reader, out, depth + 1)
        out((yield from reader.space()))
        if (yield from reader.sees(closing)):
            out(closing)
            return
        yield from reader.expect(",")
        out("," + (yield from reader.space()))


class Incremental:
    """A parser: pieces of a text go in, parts come out.

    However the text is cut into pieces, the parts are the same, once they are `merged`. A class of
    it says in `_run` how a text is read; it hands parts to `_say`.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self._parts: list[Part] = []
        self._running = self._run()

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._reader.text += text
        return self._advance()

    def finish(self) -> list[Part]:
        """The rest, after the last piece."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._running, None)
        found, self._parts = merged(self._parts), []
        return found

    def _say(self, part: Part) -> None:
        self._parts.append(part)

    def _run(self) -> Reading[None]:
        raise NotImplementedError
