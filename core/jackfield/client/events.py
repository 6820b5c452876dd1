"""Server-sent events, taken apart as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jackfield.parsing.said import ToolCallDelta

DONE = "[DONE]"


class Events:
    """Cuts bytes, however they are split, into the data of events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of the events that `data` completes."""
        text = self._rest + data
        if b"\r" in text:  # one at the end may be half of a line end
            half = text.endswith(b"\r")
            text = text.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            text += b"\r" if half else b""
        *whole, self._rest = text.split(b"\n\n")
        for event in whole:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if _is_data(line)]
            if lines:
                yield b"\n".join(lines).decode(errors="replace")


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:")


@dataclass(frozen=True)
class Piece:
    """What one event of a stream says of the first choice; `error` ends the stream."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None


def _call(data: Any) -> ToolCallDelta:
    function = data.get("function") or {}
    name, text = function.get("name") or None, function.get("arguments") or ""
    number = int(data.get("index") or 0)
    return ToolCallDelta(number, str(data.get("id") or "") or None, name and str(name), str(text))


def piece_of(data: str) -> Piece:
    """The meaning of an event that is not `DONE`, of a chat or a text completion."""
    try:
        chunk = json.loads(data)
        if error := chunk.get("error"):
            return Piece(error=str(error["message"] if isinstance(error, dict) else error))
        usage = chunk.get("usage")
        choices = chunk.get("choices") or [{}]
        choice = choices[0]
        delta = choice.get("delta") or {}
        return Piece(
            delta.get("content") or choice.get("text") or "",
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            tuple(_call(call) for call in delta.get("tool_calls") or ()),
            choice.get("finish_reason"),
            usage if isinstance(usage, dict) else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return Piece(error="an event of the stream is not what OpenAI's protocol says")
