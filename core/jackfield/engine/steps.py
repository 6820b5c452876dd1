"""What a step of the engine feeds, and what it did to each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jackfield.contracts import Accepted, ScheduledSequence, Step
from jackfield.engine.sequences import RunningSequence


@dataclass(frozen=True, slots=True)
class ScheduledRunning(ScheduledSequence):
    """One sequence's part of a step."""

    sequence: RunningSequence

    @property
    def ended(self) -> bool:
        """Whether the text has ended, before this step or in it."""
        return self.sequence.finish_reason is not None

    def kept(self, gain: Accepted) -> int:
        """How many of the fed tokens stay: its own, and the drafts that were accepted."""
        if not self.drafts:
            return self.num_tokens
        return self.num_tokens + max(0, min(len(self.drafts), len(gain.tokens) - 1))


@dataclass(frozen=True, slots=True)
class RunningStep(Step):
    """What one forward call computes."""

    scheduled: Seq[ScheduledRunning]


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to one sequence: the tokens it took, the text it may show."""

    sequence: RunningSequence
    tokens: list[int]
    text: str
