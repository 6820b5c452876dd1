"""The scheduler kind: who enters next, and who computes how many tokens in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import ClassVar

from jackfield.contracts.backend import Backend, BindContext
from jackfield.contracts.sequences import Sequence


class Schedule(ABC):
    """A bound scheduler. The loop calls `order` when a request may enter, `portions` every step.

    `step` counts the steps of the loop; `sequence.arrival` is the step before which a request came.
    What breaks the contract fails every request with a PluginError that names the scheduler.
    """

    @abstractmethod
    def order(self, waiting: Seq[Sequence], step: int) -> list[Sequence]:
        """All of `waiting`, the one that enters first at the front.

        No request may be overtaken for ever.
        """

    @abstractmethod
    def portions(
        self, running: Seq[Sequence], pending: Seq[int], budget: int, step: int
    ) -> list[int]:
        """How many tokens each of `running` feeds in this step: at most `pending[i]`, at least 0.

        `pending` is 1 for a sequence that decodes. The sum is at most `budget`, which is at
        least the number of sequences that decode; it is at least 1.
        """


class Scheduler(Backend):
    """Who computes how many tokens in a step. `bind` is called once per model."""

    kind: ClassVar[str] = "scheduler"
    bound: ClassVar[tuple[type, ...]] = (Schedule,)

    @abstractmethod
    def bind(self, context: BindContext) -> Schedule:
        """Return the schedule for one engine."""
