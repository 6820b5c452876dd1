"""What a text must look like, as a request asks for it: checked, and not compiled yet."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from jackfield.contracts.settings import Structure
from jackfield.errors import SettingsError, quoted
from jackfield.requests.token_settings import whole_text

#: The settings that say what a text must look like; a request has one of them.
#: A rule of llama.cpp's grammars, which no line of Lark begins with.
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

KINDS = ("choices", "grammar", "json_schema", "regex")

_LONGEST = 200_000  # characters of a structure; of more, some take minutes or fail in mid-text
#: Ways to go on in one place; llguidance has room for four items each in a row of 2000.
_WIDEST = 450


def read(given: Mapping[str, Any], *, has_tokenizer: bool) -> Structure | None:
    """The structure that settings ask for. Raises SettingsError; grammars are not looked at yet."""
    named = [kind for kind in KINDS if given.get(kind) is not None]
    if not named:
        return None
    if len(named) > 1:
        raise SettingsError(f"{' and '.join(named)} both say what the text is to be; give one")
    (kind,) = named
    if not has_tokenizer:
        raise SettingsError(f"{kind} is about text, and this model has no tokenizer")
    if importlib.util.find_spec("llguidance") is None:
        raise SettingsError(f"{kind} needs llguidance: `pip install jackfield[structured]`")
    source = _source(kind, given[kind])
    if len(source) > _LONGEST:
        raise SettingsError(
            f"{kind} has {len(source)} characters, and {_LONGEST} are the most; make it shorter"
        )
    return Structure(kind, source)


def _check_width(schema: Any) -> None:
    """Raise SettingsError where llguidance would give up in the middle of a text."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            for key, what in (("properties", "optional properties"), ("anyOf", "ways"),
                              ("oneOf", "ways")):  # fmt: skip
                own = part.get(key)
                ways = len(own) if isinstance(own, dict | list) else 0
                needed = part.get("required") if key == "properties" else None
                ways -= len(needed) if isinstance(needed, list) else 0
                if ways > _WIDEST:
                    raise SettingsError(
                        f"json_schema: {ways} {what} in one {key}, and {_WIDEST} are the most; "
                        "require them, or take fewer"
                    )
            left += part.values()
        elif isinstance(part, list):
            left += part


def _source(kind: str, value: Any) -> str:
    if kind == "choices":
        strings = isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value)
        if not (strings and value):
            raise SettingsError(f"choices must be a list of texts, none empty, not {quoted(value)}")
        return json.dumps(list(dict.fromkeys(value)))
    if kind == "json_schema":
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"json_schema is not JSON: {error}") from None
        except RecursionError:
            raise SettingsError("json_schema is nested too deeply; make it flatter") from None
        if not isinstance(schema, dict):
            raise SettingsError(f"json_schema must be an object, not {quoted(value)}")
        _check_width(schema)
        return text
    if (
        isinstance(value, str) and not value and kind == "regex"
    ):  # the empty text, which llguidance wants to be told so
        return "()"
    if not isinstance(value, str) or not value:
        raise SettingsError(f"{kind} must be a text, not {quoted(value)}")
    if kind == "grammar" and _GBNF.search(value):
        raise SettingsError(
            "grammar is written in GBNF, and grammars are Lark's here: write start: … for "
            "root ::= …"
        )
    return whole_text(kind, value)
