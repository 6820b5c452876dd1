"""What drafts gained, as reports show it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields
from typing import Any

from jackfield.sampling.drafted import Drafted


@dataclass(frozen=True)
class Resting:
    """A strategy whose drafts lose time: none are made for a while.

    With about `rows` sequences decoding was `speedup` times as fast as without drafts. It rests for
    `steps` steps of so many sequences, `since` (seconds since 1970).
    """

    decoding: str
    rows: int
    speedup: float
    steps: int
    since: float

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.since))
        rows = f"{self.rows} sequences" if self.rows != 1 else "1 sequence"
        return f"{self.decoding} rests since {when}: with {rows} {self.speedup:.2f} times as fast"


@dataclass(frozen=True)
class Speculation:
    """What drafts did: `steps` gave `tokens` tokens; of `proposed` drafts `accepted` were right.

    `cooldowns` counts how often a strategy did not pay for a request, which went without for a
    while; `rests`, of an engine, how often one lost time, and went without for all. `resting` are
    those that do now.
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    cooldowns: int = 0
    rests: int = 0
    resting: tuple[Resting, ...] = ()

    @property
    def acceptance_rate(self) -> float | None:
        """The share of the drafts that were right; None where there were none."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_step(self) -> float | None:
        """How many tokens a sequence gains in a step; None before the first."""
        return self.tokens / self.steps if self.steps else None

    def since(self, before: Speculation) -> Speculation:
        """What was counted after `before`."""
        counts = {name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        return Speculation(**counts, resting=self.resting)

    def to_dict(self) -> dict[str, Any]:
        rates = {"acceptance_rate": self.acceptance_rate, "tokens_per_step": self.tokens_per_step}
        return asdict(self) | rates

    def __str__(self) -> str:
        text = f"{self.accepted} of {self.proposed} drafts right ({self.acceptance_rate or 0:.0%})"
        text += f", {self.tokens_per_step or 0:.2f} tokens a step"
        text += f", {self.cooldowns} cooldowns" if self.cooldowns else ""
        text += f", {self.rests} rests" if self.rests else ""
        return ", ".join([text, *map(str, self.resting)])


_COUNTS = tuple(f.name for f in fields(Speculation) if f.name != "resting")


def total(
    counts: Seq[Drafted], rests: int = 0, resting: tuple[Resting, ...] = ()
) -> Speculation | None:
    """The sum of what drafts did; None where there is nothing to sum."""
    if not counts:
        return None
    names = [name for name in _COUNTS if name != "rests"]
    sums = {name: sum(getattr(c, name) for c in counts) for name in names}
    return Speculation(**sums, rests=rests, resting=resting)
