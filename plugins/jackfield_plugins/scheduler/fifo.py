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
    """Higher priorities enter first, equal ones in the order in which they came."""

    name = "fifo"
    options = PatienceOptions
    auto_rank = 10

    def bind(self, context: BindContext) -> Schedule:
        return FifoSchedule(context.options.patience)


class FifoSchedule(Schedule):
    """Tokens that decode first, then prompts, in the order in which they entered."""

    def __init__(self, patience: float) -> None:
        self.patience = patience

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (-sequence.settings.priority, sequence.id)

    def schedule(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        found = [
            int(count == 1) for count in num_uncached_tokens
        ]  # decode never waits for a prompt
        left = token_budget - sum(found)
        for row in self.prompts(running, num_uncached_tokens, now):
            found[row] = min(num_uncached_tokens[row], left)
            left -= found[row]
        return found

    def prompts(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], now: float
    ) -> list[int]:
        """The rows that feed more than one token, the one that is served first at the front."""
        del running, now
        return [row for row, count in enumerate(num_uncached_tokens) if count > 1]


@hookimpl
def jackfield_scheduler() -> list[Scheduler]:
    return [Fifo()]
