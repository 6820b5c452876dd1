"""Jobs on the small model inside the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jackfield.batch.running import Job, Outcome, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]


def asks(name: str, url: str = TEXT, **body: Any) -> Json:
    """A line; by itself it asks for a few tokens of a text."""
    usual = {"prompt": f"Once {name}", "max_tokens": 4} if url == TEXT else {}
    return {
        "custom_id": name, "method": "POST", "url": url,
        "body": {"model": "demo", "temperature": 0, **usual, **body},
    }  # fmt: skip


def sorting(count: int) -> list[Json]:
    """Questions whose answers differ, in length too."""
    return [
        asks(
            f"line {at}", CHAT, max_tokens=6 + at % 7,
            messages=[{"role": "user", "content": f"Sort these numbers: {at} 7 {at * 7 % 90}"}],
        )
        for at in range(count)
    ]  # fmt: skip


def write(path: Path, lines: Iterable[Json | str | bytes]) -> Path:
    """A file of lines, of which those that are no objects stand as they are."""
    with path.open("wb") as file:
        for line in lines:
            text = json.dumps(line) if isinstance(line, dict) else line
            file.write((text.encode() if isinstance(text, str) else text) + b"\n")
    return path


def read(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def job(source: Path, output: Path, answers: Json | None = None, **arguments: Any) -> Job:
    return Job(source, output, "demo", {"max_batch_size": 32, **arguments}, answers or {})


def done(source: Path, output: Path, answers: Json | None = None, **arguments: Any) -> Outcome:
    return run(job(source, output, answers, **arguments), lambda done, of: None)


def errors_of(output: Path) -> dict[int, Json]:
    """Number of a line -> the line of the errors about it."""
    return {e["error"]["line"]: e for e in read(output.with_name(f"{output.name}.errors.jsonl"))}
