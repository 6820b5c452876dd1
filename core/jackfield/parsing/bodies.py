"""Reads the body of one tool call, in each of the forms; what is not JSON becomes JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jackfield.parsing.frames import Body, Frame
from jackfield.parsing.python_text import python_value
from jackfield.parsing.reader import (
    Malformed,
    Reader,
    Reading,
    json_string,
    json_value,
)
from jackfield.parsing.tools import Tool

_NAME = re.compile(r"[\w.:/-]+")
_KEYWORD = re.compile(r"\w+")
_LONGEST_NAME = 256
_SAID_BESIDE = ("id", "type")  # keys of a call that say nothing new


class Sink(Protocol):
    """Who is told of a call."""

    tools: Mapping[str, Tool]

    def begin(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def end(self) -> None: ...


def read_object(reader: Reader, sink: Sink, frame: Frame) -> Reading[None]:
    """`{"name": …, "arguments": {…}}`, in any order; in the usual one arguments come as they go."""
    name, early, whole = "", "", False
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from _string(reader)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and not name:
            name = _known((yield from _string(reader)), sink)
            if early:
                _say(sink, name, early)
                whole = True
        elif key == frame.key and not early and not whole:
            early = yield from read_arguments(reader, sink, name)
            whole = bool(name)
        elif key in _SAID_BESIDE:
            yield from _string(reader)
        else:
            raise Malformed
        yield from reader.space()
        if (yield from reader.sees("}")):
            break
        yield from reader.expect(",")
    if not whole:
        raise Malformed


def read_arguments(reader: Reader, sink: Sink, name: str) -> Reading[str]:
    """Told as they come, once the name is known; else returned."""
    if (yield from reader.peek()) != "{":
        raise Malformed
    if name:
        sink.begin(name)
        yield from json_value(reader, sink.arguments)
        sink.end()
        return ""
    pieces: list[str] = []
    yield from json_value(reader, pieces.append)
    return "".join(pieces)


def _string(reader: Reader) -> Reading[str]:
    pieces: list[str] = []
    yield from json_string(reader, pieces.append)
    return str(json.loads("".join(pieces)))


def _known(name: str, sink: Sink) -> str:
    if name not in sink.tools:
        raise Malformed
    return name


def _say(sink: Sink, name: str, arguments: str) -> None:
    sink.begin(name)
    sink.arguments(arguments)
    sink.end()


def read_named(reader: Reader, sink: Sink, frame: Frame) -> Reading[None]:
    """The name, a mark, and the arguments as JSON."""
    yield from reader.expect(frame.name_opens.strip())
    yield from reader.space()
    name = _known((yield from reader.run(_NAME, _LONGEST_NAME)), sink)
    yield from reader.space()
    if frame.id_opens and (yield from reader.sees(frame.id_opens)):
        yield from reader.run(_NAME, _LONGEST_NAME)
    yield from reader.expect(frame.name_ends.strip())
    yield from reader.space()
    yield from read_arguments(reader, sink, name)
    yield from reader.space()
    yield from reader.expect(frame.arguments_end.strip())


def read_python(reader: Reader, sink: Sink, frame: Frame) -> Reading[None]:
    """`name(key=value, …)`, told when it is whole."""
    name = _known((yield from reader.run(_NAME, _LONGEST_NAME)), sink)
    yield from reader.space()
    yield from reader.expect("(")
    found: dict[str, Any] = {}
    yield from reader.space()
    while not (yield from reader.sees(")")):
        key = yield from reader.run(_KEYWORD, _LONGEST_NAME)
        yield from reader.space()
        yield from reader.expect("=")
        yield from reader.space()
        if not key.isidentifier() or key in found:
            raise Malformed
        found[key] = yield from python_value(reader)
        yield from reader.space()
        if not (yield from reader.sees(",")):
            yield from reader.expect(")")
            break
        yield from reader.space()
    _say(sink, name, json.dumps(found, ensure_ascii=False))


def read_xml(reader: Reader, sink: Sink, frame: Frame) -> Reading[None]:
    """`<function=name><parameter=key>value</parameter>…</function>`, told when it is whole.

    The tool's schema says which values are no strings.
    """
    yield from reader.expect("<function=")
    name = _known((yield from reader.until(">")), sink)
    found: dict[str, Any] = {}
    yield from reader.space()
    while not (yield from reader.sees("</function>")):
        yield from reader.expect("<parameter=")
        key = yield from reader.until(">")
        value = yield from reader.until("</parameter>")
        if key in found:
            raise Malformed
        found[key] = sink.tools[name].read(key, value.removeprefix("\n").removesuffix("\n"))
        yield from reader.space()
    _say(sink, name, json.dumps(found, ensure_ascii=False))


BODIES: Mapping[Body, Callable[[Reader, Sink, Frame], Reading[None]]] = {
    "object": read_object,
    "named": read_named,
    "python": read_python,
    "xml": read_xml,
}
