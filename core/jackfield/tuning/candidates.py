"""What can be tried on a rung of the ladder, and what runs it: words that all files share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: The ladder, from below: what each decides is kept for the next.
RUNGS = ("placement", "precision", "attention", "cache", "compile", "quantize", "batch")

#: Rounds of a warm-up, at most.
WARM_UP = 3


@dataclass(frozen=True)
class Candidate:
    """A selection. `arguments` are those of `jackfield.load` beside the model."""

    rung: str
    label: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Dropped:
    """What was not measured, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Rung:
    """What can be tried on a rung beside what is there `now`, what cannot, and why nothing can."""

    now: str
    candidates: Sequence[Candidate] = ()
    dropped: Sequence[Dropped] = ()
    why_none: str = "there is nothing else here"


@dataclass(frozen=True)
class Quality:
    """How well a selection predicts a text, and how many of `total` answers are `right`."""

    perplexity: float
    right: int = 0
    total: int = 0


class Runner(Protocol):
    """A selection that is loaded and warm, in a process of its own."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None: it can."""

    @property
    def behind(self) -> float | None:
        """Seconds of a round of its warm-up that took more than it may; None: none did."""

    @property
    def took(self) -> float:
        """Seconds of its last round by the clock."""

    def round(self) -> float | None:
        """What counts of a round, in seconds: all of it, or where requests come one by one, what
        a request takes. None where it failed.
        """

    def flaws(self) -> Sequence[str]:
        """Why what it did is no result: other tokens than the model's, other backends."""

    def quality(self) -> Quality:
        """How good it is. Raises JackfieldError where it fails."""

    def peak_bytes(self) -> int | None:
        """The peak of memory since it was warm."""

    def close(self) -> None:
        """End its process."""


class Ladder(Protocol):
    """Says what can be tried, by a registry or by a table."""

    def rung(self, name: str, best: Mapping[str, Any]) -> Rung:
        """What can be tried beside the `best` arguments so far."""

    def prune(
        self, candidate: Candidate, best: Mapping[str, Any], seconds: float, beside: int
    ) -> str | None:
        """Why a candidate need not be measured; None: it must.

        The best takes `seconds`, and so many others will be loaded `beside` this one.
        """


class Starter(Protocol):
    """Loads selections, each in a process of its own, and warms them up.

    A warm-up ends with a round of more than `most` seconds, but for its first. Each may take
    `least` seconds to load whatever time is left.
    """

    def __call__(
        self, candidates: Sequence[Candidate], most: float, least: float
    ) -> Sequence[Runner]: ...
