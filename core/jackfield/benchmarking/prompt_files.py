"""A workload in a file: a JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.json_lines import new_tokens, prompt_of, read_objects
from jackfield.benchmarking.workload import Request, Shape, Workload, finished
from jackfield.errors import UsageError, quoted, shown

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text

#: New tokens of a request where neither its line nor the caller says.
NEW_TOKENS = 64
LATEST = 1_000_000  # seconds

_FIELDS = ("prompt", "messages", "max_new_tokens", "arrival")
EXAMPLE = '{"prompt": "…"}'


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
    requests = read_objects(
        path, _FIELDS, EXAMPLE, lambda line: _request(line, shape, text, context)
    )
    if not requests:
        raise UsageError(f"{shown(path)} has no requests; write {EXAMPLE} a line")
    if shape.rate is not None and any(one.arrival for one in requests):
        raise UsageError(f"{shown(path)} says when its requests arrive; drop --rate")
    return finished(path.name, requests, shape, context)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _request(line: dict[str, Any], shape: Shape, text: Text, context: int | None) -> Request:
    prompt = prompt_of(line)
    new = new_tokens(line, NEW_TOKENS) if shape.new_tokens is None else shape.new_tokens
    arrival = line.get("arrival", 0.0)
    if type(arrival) not in (int, float) or not 0 <= arrival <= LATEST:
        raise UsageError(f"arrival must be seconds, from 0 to {LATEST}, not {quoted(arrival)}")
    ids = text.encode(prompt)
    if context is not None and len(ids) + new > context:
        raise UsageError(
            f"it has {len(ids)} token{'s'[: len(ids) != 1]} and asks for {new} more, and the "
            f"model's context is {context}; ask for less with max_new_tokens or --new-tokens"
        )
    return Request(tuple(ids), new, float(arrival))
