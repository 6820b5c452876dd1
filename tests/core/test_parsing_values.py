"""Values are read as `json` and Python read them, and nothing else is taken for one."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from saying import VALUES
from tool_templates import tool

from jackfield.parsing.python_text import python_value
from jackfield.parsing.reader import DEEPEST, Malformed, Reader, Reading, json_value
from jackfield.parsing.tools import read_tools

BITS = st.lists(
    st.sampled_from([*'{}[]":, \n\\/u0123eE+-.tfn\'()', "true", "false", "null", "1.5e3", '"a"',
                     "\\u00e9", "\\ud83d", "\\ude00", "None", "True", "\x01", "é", "\\n", "x"]),
    max_size=12,
).map("".join)  # fmt: skip


def read(text: str, how: Callable[[Reader], Reading[Any]]) -> tuple[Any, str]:
    """What is read, piece by piece, and the rest. Raises Malformed."""
    reader = Reader()
    running = how(reader)
    for char in [*text, None]:
        reader.text += char or ""
        reader.ended = char is None
        try:
            next(running)
        except StopIteration as end:
            return end.value, text[reader.at :]
    raise AssertionError("waits for more than there is")


def as_json(reader: Reader) -> Reading[str]:
    pieces: list[str] = []
    yield from json_value(reader, pieces.append)
    return "".join(pieces)


@given(text=BITS | VALUES.map(json.dumps) | VALUES.map(lambda v: json.dumps(v, indent=1)))
@example(text='"\\u12"')
@example(text="-01")
def test_json_is_what_json_reads(text: str) -> None:
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        end = -1
    try:
        found, rest = read(text, as_json)
    except Malformed:
        # a number that could be shorter is none here: nothing follows one without a mark
        assert end < 0 or text[end : end + 1] in tuple("0123456789+-.eE")
        return
    assert end == len(text) - len(rest)
    assert json.loads(found) == value
    assert found == text[:end] or "\n" in text or "\x01" in text


@example(text="01")
@example(text="-007.5")
@example(text='"\\{"')
@given(text=BITS | VALUES.map(repr) | VALUES.map(json.dumps))
def test_python_is_what_python_reads(text: str) -> None:
    try:
        found, rest = read(text, python_value)
    except Malformed:
        return
    whole = text[: len(text) - len(rest)]
    try:
        expected = json.loads(whole, strict=False)
    except ValueError:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes that there are none of
                expected = ast.literal_eval(whole)
        except (ValueError, SyntaxError):
            assert any(word in whole for word in ("true", "false", "null", "\\/", "\\u", "\x01"))
            return
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(expected)) or "\\" in whole


@given(value=VALUES)
def test_every_value_that_python_writes_is_read(value: Any) -> None:
    for text in (repr(value), json.dumps(value)):
        assert read(text, python_value) == (value, "")


@pytest.mark.parametrize("how", [as_json, python_value])
def test_what_is_too_deep_is_no_value(how: Any) -> None:
    for deep in (DEEPEST, DEEPEST + 2, 100_000):
        text = "[" * deep + "]" * deep
        if deep == DEEPEST:
            assert read(text, how)[1] == ""
        else:
            with pytest.raises(Malformed):
                read(text, how)
    with pytest.raises(Malformed):
        read("9" * 5000 + " ", how)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1", "1"),
        ({"enum": [1, "b", None]}, "1", 1),
        ({"enum": [1, "b", None]}, "null", None),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/a"}, "3", 3),
        ({"$ref": "#/$defs/b"}, "3", "3"),
        ({"$ref": "#/$defs/none"}, "3", "3"),
        ({"$ref": "other.json"}, "3", "3"),
        ({}, "3", "3"),
        (True, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_plain_text_is_what_its_schema_says(schema: Any, text: str, value: Any) -> None:
    given = tool("f", a=schema)
    given["function"]["parameters"]["$defs"] = {
        "a": {"$ref": "#/$defs/c"}, "c": {"type": "integer"}, "b": {"$ref": "#/$defs/b"},
    }  # fmt: skip
    found = read_tools([given])["f"].read("a", text)
    assert (found, type(found)) == (value, type(value))
    assert read_tools([given])["f"].read("other", text) == text
