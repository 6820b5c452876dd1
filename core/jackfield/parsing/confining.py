"""Grammars that constrain a text to tool calls, or the calls in it to their schemas.

Lark as llguidance reads it: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jackfield.errors import SettingsError, quoted
from jackfield.parsing import harmony
from jackfield.parsing.frames import Body, Frame
from jackfield.parsing.tools import Tool, kinds, ways

_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HEAD = "%llguidance {}"
_LEXEMES = ("TEXT: /(?s:.*)/", "BLANK: /[ \\n]{1,4}/")


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark; marks in it that are tokens of their own (name -> id) are those tokens."""
    marks = sorted(special, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece)
        for piece in pieces
        if piece
    )


def of_frame(
    frame: Frame,
    thought: tuple[str, str] | None,
    tools: Mapping[str, Tool],
    special: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    thinks: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of a text that is calls, where one is `required`, or else may have them, or is
    JSON that the schema `answer` allows instead of them.

    A thought may come first; it `thinks` already where the prompt has opened one.
    """

    def mark(text: str) -> str:
        return literal(text, special)

    found = frame.mark if not frame.bare else ""
    head = ("" if frame.bare else frame.opens) + frame.first + frame.call_opens
    last = frame.last + ("" if frame.bare else frame.closes)
    rules: list[str] = []
    write = _BODIES[frame.body]
    if write is _object and answer is not None and frame.bare:
        write = _whole_object
    bodies = " | ".join(
        write(frame, tool, f"t{n}", mark, rules) for n, tool in enumerate(tools.values())
    )
    following = f"({mark(frame.between + frame.call_opens)} call)*" if parallel else ""
    before = _before(thought, mark, special, rules, thinks=thinks)
    many = "*" if parallel else "?"
    if required:
        start = f"{before} {mark(found)} calls"
    elif answer is not None:
        start = f"{before} ({mark(found)} calls | {_spaced(answer)})"
    elif frame.bare:
        begins = {frame.first.strip() or "{", *(thought[0][:1] if thought and not thinks else ())}
        rules.append(f"OTHER: /[^{re.escape(''.join(sorted(begins)))}\\s](?s:.*)/")
        start = f"{before} (calls | OTHER)?"
        if frame.opens and frame.opens not in special:
            rules.append(f"seek[lazy]: TEXT {mark(frame.opens)}")
            start = f"{before} (calls | seek calls | OTHER)?"
    elif found in special:
        start = f"{before} (TEXT {mark(found)} calls){many} TEXT"
    else:
        rules.append(f"seek[lazy]: TEXT {mark(found)}")
        start = f"{before} (seek calls){many} TEXT"
    return "\n".join(
        (
            _HEAD,
            f"start: {start}",
            f"calls: {mark(head[len(found) :])} call {following} {mark(last)}",
            f"call: ({bodies}) {mark(frame.call_closes)}",
            *rules,
            *_LEXEMES,
        )
    )


def _before(
    thought: tuple[str, str] | None,
    mark: Callable[[str], str],
    special: Mapping[str, int],
    rules: list[str],
    *,
    thinks: bool,
) -> str:
    """What of a thought may come first."""
    if thought is None:
        return ""
    opens, closes = thought
    if closes in special:
        rules.append(f"thought: TEXT {mark(closes)}")
    else:
        rules.append(f"thought[lazy]: TEXT {mark(closes)}")
    return "thought BLANK?" if thinks else f"({mark(opens)} thought BLANK?)?"


def of_harmony(
    tools: Mapping[str, Tool],
    special: Mapping[str, int],
    *,
    required: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The same for harmony, after `<|start|>assistant`; one call, which its mark ends."""

    def header(text: str) -> str:
        return literal(f"{harmony.CHANNEL}{text}{harmony.MESSAGE}", special)

    again = literal(f"{harmony.END}{harmony.START}assistant", special)
    constrained = f" {harmony.CONSTRAIN}json"
    bodies = " | ".join(
        f"{header(f'commentary to={harmony.FUNCTIONS}{name}{constrained}')} {_json(tool)}"
        for name, tool in tools.items()
    )
    said = f"({header('commentary')} TEXT {again})? call"
    text = "TEXT" if answer is None else _spaced(answer)
    start = "call" if required else f"({said} | {header('final')} {text})"
    return "\n".join(
        (
            _HEAD,
            f"start: ({header('analysis')} TEXT {again})? {start}",
            f"call: {bodies}",
            _LEXEMES[0],
        )
    )


def _spaced(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows, with the blanks of `json.dumps`."""
    return "%json " + json.dumps({**schema, "x-guidance": _SPACED})


def _json(tool: Tool) -> str:
    return _value(tool, tool.parameters)


def _value(tool: Tool, schema: object) -> str:
    """JSON that a schema allows; of one that need not be kept to, as far as it can be."""
    own = dict(schema) if isinstance(schema, Mapping) else {}
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions")
              if key in tool.parameters}  # fmt: skip
    how = _SPACED if tool.strict else {**_SPACED, "lenient": True}
    return "%json " + json.dumps({**shared, **own, "x-guidance": how})


_Mark = Callable[[str], str]


def _object(frame: Frame, tool: Tool, rule: str, mark: _Mark, rules: list[str]) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(frame.key)}: '
    return f"{mark(head)} {_json(tool)} {mark('}')}"


def _whole_object(frame: Frame, tool: Tool, rule: str, mark: _Mark, rules: list[str]) -> str:
    """The same beside JSON that is no call: a text that begins both would be read as the longer."""
    whole = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, frame.key: dict(tool.parameters)},
        "required": ["name", frame.key],
        "additionalProperties": False,
    }
    return _value(tool, whole)


def _named(frame: Frame, tool: Tool, rule: str, mark: _Mark, rules: list[str]) -> str:
    name = mark(f"{frame.name_opens}{tool.name}{frame.id_opens}")
    number = "/[a-zA-Z0-9]{9}/" if frame.id_opens else ""
    return f"{name} {number} {mark(frame.name_ends)} {_json(tool)} {mark(frame.arguments_end)}"


def _python(frame: Frame, tool: Tool, rule: str, mark: _Mark, rules: list[str]) -> str:
    """Keywords in the order of the schema, with commas between those that are there."""
    items = list(tool.properties.items())
    for n, (key, schema) in enumerate(items):
        value = f"{mark(f'{key}=')} {_value(tool, schema)}"
        optional = key not in tool.required
        for state, comma in (("a", ""), ("b", mark(", "))):
            skipped = f" | {rule}{state}{n + 1}" if optional else ""
            rules.append(f"{rule}{state}{n}: {comma} {value} {rule}b{n + 1}{skipped}")
    rules += [f'{rule}{state}{len(items)}: ""' for state in "ab"]
    return f"{mark(f'{tool.name}(')} {rule}a0 {mark(')')}"


def _xml(frame: Frame, tool: Tool, rule: str, mark: _Mark, rules: list[str]) -> str:
    parts = [mark(f"<function={tool.name}>\n")]
    closes = mark("\n</parameter>")
    for n, key in enumerate(tool.properties):
        schema = tool.schema(key)
        said = kinds(schema)
        if named := ways(schema):
            listed = " | ".join(mark(way) or '""' for way in named)
            rules.append(f"{rule}v{n}: ({listed}) {closes}")
        elif said and "string" not in said:
            rules.append(f"{rule}v{n}: {_value(tool, schema)} {closes}")
        else:
            rules.append(f"{rule}v{n}[lazy]: {_plain(tool, key)} {closes}")
        opens, line = mark(f"<parameter={key}>\n"), mark("\n")
        whole = f"{opens} {rule}v{n} {line}"
        parts.append(whole if key in tool.required else f"({whole})?")
    return " ".join([*parts, mark("</function>")])


def _plain(tool: Tool, key: str) -> str:
    """A string that stands there as it is."""
    schema = tool.schema(key)
    for unkept in ("format", "pattern"):
        if tool.strict and unkept in schema:
            raise SettingsError(
                f"the function {quoted(tool.name)} is strict, and this model writes arguments in a "
                f"form where the {unkept} of {quoted(key)} cannot be kept to; drop one of them"
            )
    least, most = (schema.get(name) for name in ("minLength", "maxLength"))
    if not isinstance(least, int) and not isinstance(most, int):
        return "TEXT"
    bounds = f"{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}"
    return f"/(?s:.{{{bounds}}})/"


_BODIES: Mapping[Body, Callable[[Frame, Tool, str, _Mark, list[str]], str]] = {
    "object": _object,
    "named": _named,
    "python": _python,
    "xml": _xml,
}
