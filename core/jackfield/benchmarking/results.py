"""What was measured: rows with every round, and what they say beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from jackfield.benchmarking.roofline import shares, told
from jackfield.benchmarking.verdicts import CONFIDENCE, MARGIN, Change, paired


@dataclass(frozen=True)
class Round:
    """One round: seconds in all, and medians over its requests, in seconds.

    `first` is the time to the first token, None where the program does not tell; `per_token` that
    of each later one.
    """

    seconds: float
    first: float | None
    per_token: float | None


@dataclass(frozen=True)
class Row:
    """A contender and its rounds.

    Attributes:
        label: What it is called.
        program: "jackfield", or the name of another one.
        arguments: Those of `jackfield.load` that it was given.
        reasons: Why it is no result; empty: it is one.
        notes: What a reader should know, beside that.
        rounds: In their order; those of all rows are numbered alike.
        warm_up: Seconds of the rounds before.
        parity: The worst and the mean regret of its tokens, in spreads of the logits, how many
            texts that is of, and whether its backends round on purpose; None: not judged.
        peak_bytes: The peak of memory above that of the process before it loaded; None: unknown.
        weight_bytes: What the weights take.
        limits: `roofline.Limits` as a dict; None: unknown.
        plan: What was planned, as `Plan.to_dict`.
        report: What was observed, as `Report.to_dict`.
        operators: How often a round called each operator of torch; None: nobody looked.
    """

    label: str
    program: str
    arguments: Mapping[str, Any]
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rounds: tuple[Round, ...] = ()
    warm_up: tuple[float, ...] = ()
    parity: Mapping[str, Any] | None = None
    peak_bytes: int | None = None
    weight_bytes: int | None = None
    limits: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    operators: Mapping[str, int] | None = None

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def measured(self) -> bool:
        """Whether there are times of it, valid or not."""
        return bool(self.rounds)

    @property
    def times(self) -> list[float]:
        """Seconds of each round."""
        return [one.seconds for one in self.rounds]

    @property
    def seconds(self) -> float:
        """Of a round, the median."""
        return median(self.times)

    @property
    def spread(self) -> tuple[float, float]:
        """The seconds between which the middle half of the rounds is."""
        times = sorted(self.times)
        quarter = len(times) // 4
        return times[quarter], times[-1 - quarter]

    def middle(self, name: str) -> float | None:
        """The median over the rounds of a figure that is not told by every program."""
        found = [v for one in self.rounds if (v := getattr(one, name)) is not None]
        return median(found) if found else None

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares of the device's bandwidth and operations that the median round took."""
        return None if self.limits is None else shares(self.limits, self.seconds)

    def to_dict(self, new_tokens: int) -> dict[str, Any]:
        """JSON; `new_tokens` are those of a round."""
        found = asdict(self) | {"valid": self.valid}
        if self.rounds:
            memory, compute = self.shares or (None, None)
            found["figures"] = {
                "seconds": self.seconds,
                "seconds_middle_half": list(self.spread),
                "tokens_per_second": new_tokens / self.seconds,
                "time_to_first_token": self.middle("first"),
                "time_per_token": self.middle("per_token"),
                "share_of_bandwidth": memory,
                "share_of_flops": compute,
            }
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        """The row that `to_dict` wrote. Raises KeyError, TypeError or ValueError for another."""
        own = {name: found[name] for name in cls.__dataclass_fields__}
        for name in ("reasons", "notes", "warm_up"):
            own[name] = tuple(own[name])
        own["rounds"] = tuple(Round(**one) for one in own["rounds"])
        return cls(**own)


@dataclass(frozen=True)
class Benchmark:
    """All rows, and what they were measured with.

    `workload` is `Workload.to_dict`; `base` the label of the row that others are compared with;
    `margin` by what share two rows may differ and count as the same; `surroundings` say where, when
    and with what it was measured.
    """

    rows: tuple[Row, ...]
    workload: Mapping[str, Any]
    base: str
    margin: float = MARGIN
    confidence: float = CONFIDENCE
    surroundings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, label: str) -> Row:
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(label)

    @property
    def roof(self) -> str:
        """What the rows' `shares` are of; nothing where no device was measured."""
        return "; ".join(sorted({told(row.limits) for row in self.rows if row.limits is not None}))

    def change(self, row: Row) -> Change | None:
        """How many times as long a row takes as the base; None where one of them is no result."""
        base = self[self.base]
        if row.label == self.base or not (row.valid and base.valid and row.measured):
            return None
        return paired(base.times, row.times, margin=self.margin, confidence=self.confidence)

    def to_dict(self) -> dict[str, Any]:
        new = self.workload["new_tokens"]
        rows = []
        for row in self.rows:
            change = self.change(row)
            rows.append(row.to_dict(new) | {"change": change.to_dict() if change else None})
        return {**asdict(self), "rows": rows}


def ordered(rows: Sequence[Any], number: int) -> list[Any]:
    """The order of round `number`: every row is first, last and next to every other in turn."""
    at = number // 2 % len(rows)
    turned = [*rows[at:], *rows[:at]]
    return turned[::-1] if number % 2 else turned
