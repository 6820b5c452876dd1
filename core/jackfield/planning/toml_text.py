"""TOML from Python's values; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def toml(content: Mapping[str, Any], head: str = "") -> str:
    """`content` as TOML, below lines of comment; texts, numbers, lists and tables of these.

    What is None is left out. A list of tables is an array of tables (``[[name]]``).
    """
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + "\n".join(_table(content, ())).lstrip("\n") + "\n"


def _table(content: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Its own values first, then the tables below it."""
    given = {key: value for key, value in content.items() if value is not None}
    for key, value in given.items():
        if not _is_below(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in given.items():
        if _is_below(value):
            name = ".".join(map(_key, (*path, key)))
            tables = [value] if isinstance(value, Mapping) else value
            for one in tables:
                yield ""
                yield f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
                yield from _table(one, (*path, key))


def _is_below(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping)


def _key(text: str) -> str:
    plain = text.isascii() and text.replace("_", "").replace("-", "").isalnum()
    return text if plain else _text(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    return f"[{', '.join(map(_value, value))}]"


def _text(text: str) -> str:
    """JSON's escapes are TOML's, too, but for DEL, and for half pairs, which no TOML can have."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
