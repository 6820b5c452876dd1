"""A finding of an inspection, as `jackfield doctor` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `advice` says what to do, where there is something to do."""

    area: str
    subject: str
    state: State
    message: str
    advice: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
