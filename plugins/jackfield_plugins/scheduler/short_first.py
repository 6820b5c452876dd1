"""``short-first``: short prompts before long ones, so that few tokens do not wait for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield import hookimpl
from jackfield.contracts import BindContext, Schedule, Scheduler
from jackfield_plugins.scheduler.fifo import FifoSchedule, PatienceOptions, shortest

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

    def __init__(self, patience: float) -> None:
        super().__init__(patience, shares=False)  # it has the one order

    def _rank(self, sequence: Sequence) -> tuple[float, ...]:
        return shortest(sequence)


@hookimpl
def jackfield_scheduler() -> list[Scheduler]:
    return [ShortFirst()]
