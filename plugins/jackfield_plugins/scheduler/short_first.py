"""``short-first``: short prompts before long ones, so that few tokens do not wait for many."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jackfield import hookimpl
from jackfield.contracts import BindContext, Schedule, Scheduler
from jackfield_plugins.scheduler.fifo import FifoSchedule, PatienceOptions

if TYPE_CHECKING:
    from jackfield.contracts import Sequence


class ShortFirst(Scheduler):
    """Shortest job first by what is left of the prompt; `patience` keeps long ones from starving.

    Lowers the mean time to the first token where prompts differ much in length.
    """

    name = "short-first"
    options = PatienceOptions

    def bind(self, context: BindContext) -> Schedule:
        return ShortFirstSchedule(context.options.patience)


class ShortFirstSchedule(FifoSchedule):
    """As `fifo`, with the length of what is not cached yet between priority and arrival."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        left = len(sequence.tokens) - sequence.num_cached
        return (-sequence.settings.priority, left, sequence.id)

    def prompts(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], now: float
    ) -> list[int]:
        rows = super().prompts(running, num_uncached_tokens, now)
        return sorted(rows, key=lambda row: self._place(running[row], now))

    def _place(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Who is overdue goes first, by arrival alone: else they could overtake each other."""
        if now - sequence.arrival >= self.patience:
            return (0, sequence.arrival, sequence.id)
        return (1, *self.key(sequence))


@hookimpl
def jackfield_scheduler() -> list[Scheduler]:
    return [ShortFirst()]
