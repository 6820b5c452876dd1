"""A workload in a file: a JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.workload import Request, Shape, Workload, finished
from jackfield.errors import PromptError, UsageError, first_line, quoted, shown
from jackfield.spelling import nearest

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text

#: New tokens of a request where neither its line nor the caller says.
NEW_TOKENS = 64

_FIELDS = ("prompt", "messages", "max_new_tokens", "arrival")


def of_file(path: Path, shape: Shape, text: Text, context: int | None) -> Workload:
    """The requests of a JSONL file.

    A line has a `prompt` (a text, or token ids) or `messages` of a chat, and where it likes
    `max_new_tokens` and `arrival`, in seconds from the round's beginning. Raises UsageError, which
    names the line.
    """
    shape.check()
    for name in ("prompt_tokens", "requests"):
        if getattr(shape, name) is not None:
            raise UsageError(f"{shown(path)} has prompts of its own; drop --{_flag(name)}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown(path)} is not UTF-8 text; convert it") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(_object(line), shape, text))
            except (UsageError, PromptError) as error:
                raise UsageError(f"{shown(path)}, line {number}: {error}") from None
    if not requests:
        raise UsageError(f'{shown(path)} has no requests; write {{"prompt": "…"}} a line')
    if shape.rate is not None and any(one.arrival for one in requests):
        raise UsageError(f"{shown(path)} says when its requests arrive; drop --rate")
    return finished(path.name, requests, shape, context)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UsageError('it is no JSON object; write {"prompt": "…"}')
    for name in found:
        if name not in _FIELDS:
            raise UsageError(
                f"there is no field {shown(name)!r} (fields: {', '.join(_FIELDS)})"
                f"{nearest(name, _FIELDS)}"
            )
    return found


def _request(line: dict[str, Any], shape: Shape, text: Text) -> Request:
    if ("prompt" in line) == ("messages" in line):
        raise UsageError("it needs a prompt or messages, and not both")
    new = line.get("max_new_tokens", NEW_TOKENS) if shape.new_tokens is None else shape.new_tokens
    if type(new) is not int or new < 1:
        raise UsageError(f"max_new_tokens must be a whole number, at least 1, not {quoted(new)}")
    arrival = line.get("arrival", 0.0)
    if type(arrival) not in (int, float) or not 0 <= arrival < math.inf:
        raise UsageError(f"arrival must be seconds, at least 0, not {quoted(arrival)}")
    ids = text.encode(line["prompt"] if "prompt" in line else line["messages"])
    return Request(tuple(ids), new, float(arrival))
