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


@dataclass(frozen=True)
class PatienceOptions:
    """`patience`: a request that waits for so many seconds enters before all that have not."""

    patience: float = PATIENCE

    def __post_init__(self) -> None:
        if not 0 < self.patience < math.inf:
            raise ValueError(f"patience must be more than 0 seconds, not {self.patience:g}")


class Fifo(Scheduler):
    """Higher priorities enter first, equal ones in the order in which they came.

    Half of a step's prompt tokens are for who came first, so that nobody reads its prompt for more
    than twice as long as those before it need; the other half for who has least left to read, so
    that a short prompt does not wait for a long one.
    """

    name = "fifo"
    options = PatienceOptions
    auto_rank = 10

    def bind(self, context: BindContext) -> Schedule:
        shares = not context.requirements.batch_invariant  # whose pieces are not cut
        return FifoSchedule(context.options.patience, shares=shares)


class FifoSchedule(Schedule):
    """Tokens that decode first, then prompts. `shares`: two of them at a time."""

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
            left -= _feed(prompts, num_uncached_tokens, found, left - left // 2)
            prompts.sort(key=lambda row: shortest(running[row]))
        _feed(prompts, num_uncached_tokens, found, left)
        return found

    def _place(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Who is overdue goes first, by arrival alone: else they could overtake each other."""
        if now - sequence.arrival >= self.patience:
            return (0, sequence.arrival, sequence.id)
        return (1, *self._rank(sequence))


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
