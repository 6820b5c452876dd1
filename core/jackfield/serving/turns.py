"""A turn of the assistant: what the engine is asked for, and what its text says."""

from __future__ import annotations

from typing import Any

from jackfield.engine.completions import Delta
from jackfield.engine.engine import Engine
from jackfield.serving.asking import Asking
from jackfield.serving.schema.chat import ChatRequest


class Said:
    """Cuts one text into the fields of deltas."""

    def said(self, delta: Delta) -> list[dict[str, Any]]:
        return [{"content": delta.text}] if delta.text else []

    def finish_reason(self, delta: Delta) -> str | None:
        return delta.finish_reason


class Turn:
    """What is asked of the engine for a turn; `parser` makes what reads one of its texts."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked

    def parser(self) -> Said:
        return Said()


def turn_for(body: ChatRequest, asking: Asking, engine: Engine) -> Turn:
    """How the model takes its turn. Raises ApiError."""
    asked = {**body.asked(), **asking.length(body.most, engine)}
    return Turn(asking.completed(asked))
