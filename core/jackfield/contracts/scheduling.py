"""The scheduler kind: who enters next, and who computes how many tokens in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import ClassVar

from jackfield.contracts.backend import Backend, BindContext
from jackfield.contracts.sequences import Sequence

#: Seconds after which a waiting request enters before all newer ones, whatever their keys.
PATIENCE = 30.0


class Schedule(ABC):
    """A bound scheduler. The loop asks `key` of each that begins to wait, `schedule` in every step.

    The smallest key enters first. Requests that have waited for `patience` seconds enter before all
    others, the oldest first, so no request waits for ever whatever the keys are. A
    request that does not fit into the cache yet blocks those after it.

    Times, `now` and the `arrival` of a sequence, are in seconds of one clock, whose zero means
    nothing.

    Changes: nothing. Sequences are for reading; `sequence.settings.priority` is what was asked for.

    Violations: what breaks the contract fails every request with a PluginError that names the
    scheduler. A request that runs and is given no token in 10,000 steps in a row, after more than
    twice `patience`, ends by itself, with an error that names the scheduler.

    Attributes:
        patience: In seconds, above 0 and finite. Read once, after `bind`.
    """

    patience: float = PATIENCE

    @abstractmethod
    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Say where a request stands among those that wait.

        Asked when it comes and whenever it waits again, after a preemption for one; then the key
        holds until it enters. Of those that differ in nothing else, the higher priority has the
        smaller key.

        Args:
            sequence: The one that begins to wait; of a group its first member, for all of it.

        Returns:
            Numbers, none of them NaN, compared one after the other: ``(-priority, …)``. Of equals
            the one that came first enters first.
        """

    @abstractmethod
    def schedule(
        self, running: Seq[Sequence], num_uncached_tokens: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        """Say how many tokens each feeds in this step; asked again after a preemption.

        On a GPU it may be asked before the tokens of the step before are read. `tokens` then lack
        the last one, which `num_uncached_tokens` counts, a text may be among them that has just
        ended, and where the step does not fit yet, it is asked again for it.

        Where the tokens of an image see one another, the loop feeds less than this says, so that
        no step cuts one; of one image that would be begun it feeds all, and others then wait where
        there is no room.

        With `deterministic=True` less than `num_uncached_tokens[i]` counts as 0, and at least one
        sequence must get all of its tokens.

        Args:
            running: All that run.
            num_uncached_tokens: How many tokens of each are not cached yet, at least 1 and at most
                `prefill_chunk_size`; 1 for a sequence that decodes.
            token_budget: How many all of them may feed together; at least the number of those that
                decode.
            now: The time, in seconds of the same clock as `arrival`.

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
