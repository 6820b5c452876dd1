"""What a climb ends with, and the sentences that it is told in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from jackfield.benchmarking.verdicts import Change
from jackfield.tuning.candidates import Quality


@dataclass(frozen=True)
class Tried:
    """What was tried, and what became of it.

    `times` are the seconds of its rounds; none: it was not measured. `change` is beside the best at
    that time. `verdict` is "auto", "taken", "slower", "not faster for certain", "behind after 2
    rounds", or why it was refused, failed or was dropped.
    """

    rung: str
    label: str
    verdict: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    times: Sequence[float] = ()
    change: Change | None = None
    peak_bytes: int | None = None
    quality: Quality | None = None

    @property
    def seconds(self) -> float | None:
        return median(self.times) if self.times else None


@dataclass(frozen=True)
class Outcome:
    """What the climb ends with: arguments of `jackfield.load`, and all that was tried.

    `change` is the best beside auto, in a race of their own; None: there was none, or one of them
    failed in it. `finished` is false where the best was not compared with auto, since somebody
    `interrupted` the climb or auto failed. `unreached` are the rungs that there was no time for.
    """

    arguments: Mapping[str, Any]
    tried: Sequence[Tried]
    change: Change | None
    finished: bool
    interrupted: bool = False
    unreached: Sequence[str] = ()


def told_change(change: Change | None, beside: str = "the best before") -> str:
    if change is None:
        return ""
    known = f"{change.low:.2f} to {change.high:.2f} in " if change.low > 0 else ""
    return (
        f" takes {change.ratio:.2f} times as long as {beside} "
        f"({known}{change.rounds} round{'s' if change.rounds > 1 else ''})"
    )


def told_quality(quality: Quality | None) -> str:
    if quality is None:
        return ""
    answers = f", {quality.right} of {quality.total} answers right" if quality.total else ""
    return f"; perplexity {quality.perplexity:.4g}{answers}"
