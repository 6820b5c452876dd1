"""Bodies as JSON, read strictly: what two readers could understand in two ways is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from jackfield.errors import quoted, shown
from jackfield.serving.errors import refused

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(rb"[\[{]|[\]}]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(body: bytes, max_depth: int) -> Any:
    """The value of `body`. Raises ApiError (400) unless it is JSON in UTF-8 that everybody reads
    alike: no name twice, no number without a value, no half of a character, `max_depth` levels at
    most.
    """
    if (depth := depth_of(body)) > max_depth:
        raise refused(f"the body is nested {depth} deep; at most {max_depth} are read", None)
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_number
        )
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8: {shown(error)}", None) from None
    except ValueError as error:
        raise refused(f"the body is not JSON: {shown(error)}", None) from None
    if _SURROGATE.search(text) and (path := _half(value, ())) is not None:
        where = ".".join(path)
        raise refused(f"{where or 'the body'} has half of a character (a lone surrogate)",
                      where or None)  # fmt: skip
    return value


def depth_of(body: bytes) -> int:
    """How deep JSON is nested, without reading it."""
    deepest = depth = 0
    for match in _BRACKETS.finditer(_STRING.sub(b"", body)):
        depth += 1 if match.group() in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise refused(f"the body has {quoted(twice)} twice in one object", _shown(twice))
    return found


def _no_number(text: str) -> NoReturn:
    raise refused(f"the body has {text}, which is no number of JSON", None)


def _number(text: str) -> float:
    if math.isinf(found := float(text)):
        raise refused(f"the body has a number that is too large: {text[:40]}", None)
    return found


def _half(value: Any, path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Where the half of a character is; names that have one are left out."""
    if isinstance(value, str):
        return path if _is_half(value) else None
    if isinstance(value, dict):
        if any(map(_is_half, value)):
            return path
        inner: Any = value.items()
    else:
        inner = enumerate(value) if isinstance(value, list) else ()
    found = (_half(item, (*path, str(name))) for name, item in inner)
    return next((where for where in found if where is not None), None)


def _is_half(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _shown(name: str) -> str:
    return name.encode(errors="replace").decode()
