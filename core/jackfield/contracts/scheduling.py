"""The scheduler kind: who enters next, and who computes how many tokens in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import ClassVar

from jackfield.contracts.backend import Backend, BindContext
from jackfield.contracts.sequences import Sequence


class Schedule(ABC):
    """A bound scheduler. The loop calls `order` when a request may enter, `schedule` every step.

    Times, `now` and the `arrival` of a sequence, are in seconds of one clock, whose zero means
    nothing.

    Changes: nothing. Sequences are for reading; `sequence.settings.priority` is what was asked for.

    Violations: what breaks the contract fails every request with a PluginError that names the
    scheduler. A request that it passes over for ever (10,000 turns of others, after it has waited
    ten minutes or while it runs) ends by itself, with an error that names the scheduler.
    """

    @abstractmethod
    def order(self, waiting: Seq[Sequence], now: float) -> list[Sequence]:
        """Say who enters first. No request may be overtaken for ever.

        Of those that came together and differ in nothing else, a higher priority goes first.

        A request that does not fit into the cache yet blocks the requests after it.

        Args:
            waiting: Those that may enter; of a group the first member, for all of it.
            now: What the clock says.

        Returns:
            All of `waiting`, each once, the one that enters first at the front.
        """

    @abstractmethod
    def schedule(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        """Say how many tokens each feeds in this step; asked again after a preemption.

        With `deterministic=True` less than `num_uncached_tokens[i]` counts as 0, and giving nobody
        all of them breaks the contract.

        Args:
            running: All that run.
            num_uncached_tokens: How many tokens of each are not cached yet, at least 1 and at most
                `prefill_chunk_size`; 1 for a sequence that decodes.
            token_budget: How many all of them may feed together; at least the number of those that
                decode.
            now: What the clock says.

        Returns:
            One int each, 0 to `num_uncached_tokens[i]`; in sum 1 to `token_budget`. Drafts are not
            counted here.
        """


class Scheduler(Backend):
    """Who enters next, and who computes how many tokens in a step."""

    kind: ClassVar[str] = "scheduler"
    bound: ClassVar[tuple[type, ...]] = (Schedule,)

    @abstractmethod
    def bind(self, context: BindContext) -> Schedule:
        """Return the schedule for one engine. Called once a model.

        Args:
            context: The model is there; a schedule seldom needs it.
        """
