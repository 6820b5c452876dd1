"""Files of a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jackfield.errors import UsageError, first_line, quoted, shown
from jackfield.spelling import nearest

Made = TypeVar("Made")


def read_objects(
    path: Path, fields: Sequence[str], example: str, make: Callable[[dict[str, Any]], Made]
) -> list[Made]:
    """What `make` makes of each line, an object with some of `fields`, such as the `example`.

    Raises UsageError, which names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown(path)} is not UTF-8 text; convert it") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have all else that ends lines
        if line.strip():
            try:
                found.append(make(_object(line, fields, example)))
            except UsageError as error:
                raise UsageError(f"{shown(path)}, line {number}: {error}") from None
    return found


def new_tokens(line: dict[str, Any], usual: int) -> int:
    """What a line says of new tokens. Raises UsageError."""
    most = line.get("max_new_tokens", usual)
    if type(most) is not int or most < 1:
        raise UsageError(f"max_new_tokens must be a whole number, at least 1, not {quoted(most)}")
    return most


def prompt_of(line: dict[str, Any]) -> Any:
    """Its prompt, or its messages. Raises UsageError where it has neither, or both."""
    if ("prompt" in line) == ("messages" in line):
        raise UsageError("it needs a prompt or messages, and not both")
    return line["prompt"] if "prompt" in line else line["messages"]


def _object(line: str, fields: Sequence[str], example: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UsageError(f"it is no JSON object; write {example}")
    for name in found:
        if name not in fields:
            raise UsageError(
                f"there is no field {shown(name)!r} (fields: {', '.join(fields)})"
                f"{nearest(name, fields)}"
            )
    return found
