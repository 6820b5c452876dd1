"""``fifo``: first come, first served, within a priority."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield import hookimpl
from jackfield.contracts import PATIENCE, BindContext, Schedule, Scheduler

if TYPE_CHECKING:
    from jackfield.contracts import Sequence

PART, PART_IF_OVERDUE = 8, 2  # one in so many prompt tokens is for who came first


@dataclass(frozen=True)
class PatienceOptions:
    """`patience`: a request that waits for so many seconds enters before all that have not."""

    patience: float = PATIENCE

    def __post_init__(self) -> None:
        if not 0 < self.patience < math.inf:
            raise ValueError(f"patience must be more than 0 seconds, not {self.patience:g}")


class Fifo(Scheduler):
    """Higher priorities enter first, equal ones in the order in which they came.

    Of a step's prompt tokens an eighth is for who came first, and half once that one has waited for
    longer than `patience`; the rest is for who has least left to read, so that short prompts do not
    wait for long ones, and long ones are never at a standstill.
    """

    name = "fifo"
    options = PatienceOptions
    auto_rank = 10

    def bind(self, context: BindContext) -> Schedule:
        shares = not context.requirements.batch_invariant  # whose pieces are not cut
        return FifoSchedule(context.options.patience, shares=shares)


class FifoSchedule(Schedule):
    """Tokens that decode first, then prompts: in one order, or with `shares` in two."""

    def __init__(self, patience: float, *, shares: bool = True) -> None:
        self.patience = patience
        self._shares = shares

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return self._rank(sequence)

    def _rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (-sequence.settings.priority, sequence.id)

    def schedule(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        # Decode never waits for a prompt.
        found = [int(count == 1) for count in num_uncached_tokens]
        left = token_budget - sum(found)
        prompts = [row for row, count in enumerate(num_uncached_tokens) if count > 1]
        prompts.sort(key=lambda row: self._place(running[row], now))
        if self._shares and len(prompts) > 1:
            part = PART_IF_OVERDUE if self._overdue(running[prompts[0]], now) else PART
            left -= _feed(prompts, num_uncached_tokens, found, -(-left // part))
            prompts.sort(key=lambda row: shortest(running[row]))
        _feed(prompts, num_uncached_tokens, found, left)
        return found

    def _place(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Who is overdue goes first, by arrival alone: else they could overtake each other."""
        if self._overdue(sequence, now):
            return (0, sequence.arrival, sequence.id)
        return (1, *self._rank(sequence))

    def _overdue(self, sequence: Sequence, now: float) -> bool:
        return now - sequence.arrival >= self.patience


def shortest(sequence: Sequence) -> tuple[float, ...]:
    """What orders requests by what is left to read, within a priority."""
    left = len(sequence.tokens) - sequence.num_cached
    return (-sequence.settings.priority, left, sequence.id)


def _feed(rows: Seq[int], uncached: Seq[int], found: list[int], tokens: int) -> int:
    """Give `tokens` to `rows`, in this order; `found` has what each gets. Returns how many."""
    left = tokens
    for row in rows:
        more = min(uncached[row] - found[row], left)
        found[row] += more
        left -= more
    return tokens - left


@hookimpl
def jackfield_scheduler() -> list[Scheduler]:
    return [Fifo()]
