"""A caller's own questions with one right answer each, as a JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError, first_line, quoted, shown
from jackfield.spelling import nearest

#: New tokens of an answer where its line does not say.
NEW_TOKENS = 64
_FIELDS = ("prompt", "messages", "answer", "max_new_tokens")


def read_answers(path: Path) -> list[tuple[Any, str, int]]:
    """(prompt or messages, the right answer, new tokens at most) of each line.

    Raises UsageError, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read {shown(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown(path)} is not UTF-8 text; convert it") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_answer(line))
            except UsageError as error:
                raise UsageError(f"{shown(path)}, line {number}: {error}") from None
    if not found:
        raise UsageError(
            f'{shown(path)} has no answers; write {{"prompt": "…", "answer": "…"}} a line'
        )
    return found


def _answer(line: str) -> tuple[Any, str, int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UsageError('it is no JSON object; write {"prompt": "…", "answer": "…"}')
    for name in found:
        if name not in _FIELDS:
            raise UsageError(
                f"there is no field {shown(name)!r} (fields: {', '.join(_FIELDS)})"
                f"{nearest(name, _FIELDS)}"
            )
    if ("prompt" in found) == ("messages" in found):
        raise UsageError("it needs a prompt or messages, and not both")
    if not isinstance(answer := found.get("answer"), str) or not answer.strip():
        raise UsageError(f"answer must be a text, not {quoted(answer)}")
    most = found.get("max_new_tokens", NEW_TOKENS)
    if type(most) is not int or most < 1:
        raise UsageError(f"max_new_tokens must be a whole number, at least 1, not {quoted(most)}")
    prompt = found.get("prompt", found.get("messages"))
    if not isinstance(prompt, str if "prompt" in found else list) or not prompt:
        raise UsageError(f"a prompt is a text, and messages are a list, not {quoted(prompt)}")
    return prompt, answer, most
