"""Reads values as Python and JSON write them, from text that comes in pieces."""

from __future__ import annotations

import re
from typing import Any

from jackfield.parsing.reader import DEEPEST, Malformed, Reader, Reading

_WORDS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_WORD = re.compile(r"[-+.\w]+")
_INTEGER = re.compile(r"[-+]?(0+|[1-9][0-9]*)")  # Python has no 01
_REAL = re.compile(
    r"[-+]?([0-9]+(\.[0-9]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9]+([eE][-+]?[0-9]+)?)"
)
_LONGEST = 400  # characters of a number
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"',
    "/": "/", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}


def python_value(reader: Reader, depth: int = 0) -> Reading[Any]:
    """One value, which JSON can write. Raises Malformed."""
    first = yield from reader.peek()
    if depth > DEEPEST:
        raise Malformed
    if first in ("'", '"'):
        return (yield from _string(reader, first))
    if first in ("[", "("):
        return (yield from _list(reader, {"[": "]", "(": ")"}[first], depth))
    if first == "{":
        return (yield from _dict(reader, depth))
    word = yield from reader.run(_WORD, _LONGEST)
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    if _REAL.fullmatch(word) and abs(value := float(word)) < float("inf"):
        return value
    raise Malformed


def _list(reader: Reader, closing: str, depth: int) -> Reading[list[Any]]:
    reader.at += 1
    found: list[Any] = []
    yield from reader.space()
    while not (yield from reader.sees(closing)):
        found.append((yield from python_value(reader, depth + 1)))
        yield from reader.space()
        if not (yield from reader.sees(",")):
            yield from reader.expect(closing)
            if closing == ")" and len(found) == 1:  # a value in parentheses is no tuple
                raise Malformed
            break
        yield from reader.space()
    return found


def _dict(reader: Reader, depth: int) -> Reading[dict[str, Any]]:
    reader.at += 1
    found: dict[str, Any] = {}
    yield from reader.space()
    while not (yield from reader.sees("}")):
        key = yield from python_value(reader, depth + 1)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if not isinstance(key, str):
            raise Malformed
        found[key] = yield from python_value(reader, depth + 1)
        yield from reader.space()
        if not (yield from reader.sees(",")):
            yield from reader.expect("}")
            break
        yield from reader.space()
    return found


def _string(reader: Reader, quote: str) -> Reading[str]:
    reader.at += 1
    pieces = []
    while (char := (yield from reader.peek())) != quote:
        reader.at += 1
        if char in ("", "\n"):
            raise Malformed
        pieces.append((yield from _escaped(reader)) if char == "\\" else char)
    reader.at += 1
    text = "".join(pieces)
    try:  # JSON writes characters beyond the first 65536 as two escapes
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise Malformed from None


def _escaped(reader: Reader) -> Reading[str]:
    kind = yield from reader.peek()
    reader.at += len(kind)
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    if kind not in _HEX:
        return "\\" + kind  # as in Python
    end = reader.at + _HEX[kind]
    while len(reader.text) < end and not reader.ended:
        yield
    digits, reader.at = reader.text[reader.at : end], end
    if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[kind]}}}", digits) or int(digits, 16) > 0x10FFFF:
        raise Malformed
    return chr(int(digits, 16))
