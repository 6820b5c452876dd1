"""Schedules held to their contract: what one gets wrong is an error, and so is who never runs."""

from __future__ import annotations

from collections.abc import Iterable
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

WATCHED = 64  # of those that wait, the first: thousands would cost milliseconds
LONG = 600.0  # seconds after which a request that waits has waited long
FOR_EVER = 10_000  # turns that others got before it since then, or in a row while it runs


def _nothing(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


class CheckedSchedule:
    """`inner`, called `name` in errors. The checks take a few microseconds a step.

    `closely`: also what it may have changed of the requests. It counts whom the scheduler passes
    over, too: `starved` has those that would wait for ever.
    """

    def __init__(self, inner: Schedule, name: str, *, closely: bool = True) -> None:
        self._inner = inner
        self._name = name
        self._unchanged = partial(unchanged, self) if closely else _nothing
        self._neglected: list[RunningSequence] = []
        self._guards = {what: guarded(self, what) for what in ("order", "schedule")}

    def __str__(self) -> str:
        return self._name

    def order(self, waiting: Seq[Sequence], now: float) -> list[Sequence]:
        waiting = tuple(waiting)
        with self._guards["order"], self._unchanged("order", waiting[:WATCHED]):
            found = list(islice(self._inner.order(waiting, now), len(waiting) + 1))
            whole = len(found) == len(waiting) and set(found) == set(waiting)
        if not whole:
            raise fault(
                self,
                f"order must return all {len(waiting)} requests that wait, each once; "
                f"got {len(found)}, {len(set(found) & set(waiting))} of them among those",
            )
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
            else:
                self._pass_over(sequence)
        return found

    def count_passed(
        self, waiting: Iterable[RunningSequence], entered: Seq[RunningSequence], now: float
    ) -> None:
        """Count, for those that have waited long, who came later, with no right to be first."""
        for sequence in waiting if entered else ():
            if now - sequence.arrival > LONG and any(
                other.arrival > sequence.arrival
                and other.settings.priority <= sequence.settings.priority
                for other in entered
            ):
                self._pass_over(sequence)

    def _pass_over(self, sequence: RunningSequence) -> None:
        sequence.passed_over += 1
        if sequence.passed_over > FOR_EVER:
            self._neglected.append(sequence)

    def starved(self) -> list[RunningSequence]:
        """Those that were passed over for ever since the last call."""
        found, self._neglected = self._neglected, []
        return found
