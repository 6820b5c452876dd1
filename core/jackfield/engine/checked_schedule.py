"""Checks of schedules: wrong numbers are an error, and so is a request that never gets tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from operator import le

from jackfield.contracts import Schedule, Sequence
from jackfield.engine.checked import unchanged
from jackfield.engine.sequences import RunningSequence
from jackfield.errors import quoted
from jackfield.guarded import fault, guarded

FOR_EVER = 10_000  # steps in a row in which a request runs and is given nothing, past all patience
_NUMBERS = frozenset({int, float, bool})


def _nothing(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


class CheckedSchedule:
    """`inner`, called `name` in errors. The checks take a few microseconds a step.

    `closely`: also what it may have changed of the requests. It counts whom the scheduler passes
    over, too: `starved` has those that would run for ever.
    """

    def __init__(self, inner: Schedule, name: str, *, closely: bool = True) -> None:
        self._inner = inner
        self._name = name
        self._unchanged = partial(unchanged, self) if closely else _nothing
        self._neglected: list[RunningSequence] = []
        self._guards = {what: guarded(self, what) for what in ("key", "schedule")}
        self.patience = self._checked_patience()

    def __str__(self) -> str:
        return self._name

    def _checked_patience(self) -> float:
        with guarded(self, "patience"):
            patience = self._inner.patience
        if type(patience) not in _NUMBERS or not 0 < patience < math.inf:
            raise fault(
                self, f"patience must be a number of seconds above 0, not {quoted(patience)}"
            )
        return patience

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        with self._guards["key"], self._unchanged("key", (sequence,)):
            found = self._inner.key(sequence)
        if type(found) is not tuple or not all(type(n) in _NUMBERS and n == n for n in found):
            raise fault(self, f"key must return a tuple of numbers, not {quoted(found)}")
        return found

    def schedule(
        self, running: Seq[RunningSequence], uncached: Seq[int], token_budget: int, now: float
    ) -> list[int]:
        running, uncached = tuple(running), tuple(uncached)
        with self._guards["schedule"], self._unchanged("schedule", running):
            said = self._inner.schedule(running, uncached, token_budget, now)
            found = list(islice(said, len(running) + 1))
            right = (
                len(found) == len(uncached)
                and set(map(type, found)) <= {int}
                and min(found, default=0) >= 0
                and all(map(le, found, uncached))
                and 0 < sum(found) <= token_budget
            )
        if not right:
            raise fault(
                self,
                f"schedule must return {len(uncached)} whole numbers from 0 to {list(uncached)}, "
                f"1 to {token_budget} in sum; got {quoted(found)}",
            )
        for sequence, count in zip(running, found, strict=True):
            if count:
                sequence.passed_over = 0
            elif now - sequence.arrival > 2 * self.patience:
                self._pass_over(sequence)
        return found

    def _pass_over(self, sequence: RunningSequence) -> None:
        sequence.passed_over += 1
        if sequence.passed_over > FOR_EVER:
            self._neglected.append(sequence)

    def starved(self) -> list[RunningSequence]:
        """Those that were passed over for ever since the last call."""
        found, self._neglected = self._neglected, []
        return found
