"""What a scheduler sees of an engine, without a model: who waits, who runs, and for how long."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from jackfield.api import plan
from jackfield.contracts import BindContext, Requirements, Schedule, Sequence
from jackfield.engine.checked_schedule import FOR_EVER
from jackfield.engine.waiting import WaitingQueue
from jackfield.testing.checks import WrongError
from jackfield.testing.lent import Lent, Watch, grow, lend
from jackfield.testing.models import build
from jackfield.testing.subject import Subject

STEP = 0.1  # seconds that a simulated step takes


def bind(subject: Subject, *, deterministic: bool = False) -> Schedule:
    """The schedule of `subject`, bound as an engine binds it."""
    model, needs = _planned(subject.selection, subject.seed, deterministic)
    schedule = subject.backend.bind(
        BindContext(model=model, config=model.config, requirements=needs, options=subject.options)
    )
    if not isinstance(schedule, Schedule):
        raise WrongError(f"bind must return a Schedule, not {schedule!r:.80}")
    return schedule


@functools.cache
def _planned(selection: str, seed: int, deterministic: bool) -> tuple[Any, Requirements]:
    model = build("plain", seed=seed)
    decided = plan(model, scheduler=selection, deterministic=deterministic)
    return model, decided.requirements


class Held:
    """A schedule that is held to its contract in each call. `lists`: it is lent lists."""

    def __init__(self, schedule: Schedule, *, lists: bool = False, watches: bool = True) -> None:
        self._schedule = schedule
        self._kind: Any = list if lists else tuple
        self._watches = watches

    @property
    def patience(self) -> float:
        """Seconds that one waits at most for those that are preferred to it."""
        patience = self._schedule.patience
        if type(patience) not in (int, float) or not 0 < patience < math.inf:
            raise WrongError(f"patience is {patience!r:.40}; it is seconds, above 0 and finite")
        return patience

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Where one stands among those that wait."""
        watch = Watch((sequence,) if self._watches else ())
        found = self._schedule.key(sequence)
        watch.check("key")
        if type(found) is not tuple or any(type(n) not in (int, float, bool) for n in found):
            raise WrongError(f"key must return a tuple of numbers, not {found!r:.60}")
        if any(math.isnan(n) for n in found):
            raise WrongError(f"key returned {found!r:.60}: NaN is neither before nor after another")
        return found

    def schedule(
        self, running: Seq[Sequence], uncached: Seq[int], budget: int, now: float
    ) -> list[int]:
        """How many tokens each feeds."""
        rows, counts = self._kind(running), self._kind(uncached)
        watch = Watch(running if self._watches else ())
        said = self._schedule.schedule(rows, counts, budget, now)
        found = _listed(said, len(running) + 1, "schedule")
        watch.check("schedule")
        if list(rows) != list(running) or list(counts) != list(uncached):
            raise WrongError("schedule changed a list that it was handed, to be read")
        if flaw := _flaw(found, uncached, budget):
            raise WrongError(
                f"{flaw}, where {_shown(uncached)} are not cached and {budget} may be fed"
            )
        return found


def _listed(said: Any, most: int, what: str) -> list[Any]:
    try:
        return list(islice(said, most))
    except TypeError:
        raise WrongError(f"{what} must return a list, not {said!r:.60}") from None


def _shown(counts: Seq[int]) -> str:
    return f"{list(counts)}" if len(counts) < 9 else f"{len(counts)} counts of tokens"


def _flaw(found: list[Any], uncached: Seq[int], budget: int) -> str:
    """What is wrong with numbers of tokens; empty: nothing."""
    if len(found) != len(uncached):
        return f"schedule returned {len(found)} numbers for {len(uncached)} sequences"
    for at, (count, most) in enumerate(zip(found, uncached, strict=True)):
        if type(count) is not int:
            return f"schedule returned {count!r:.40} for sequence {at}, and no whole number"
        if not 0 <= count <= most:
            return f"schedule gives sequence {at} {count} tokens"
    if sum(found) > budget:
        return f"schedule spends {sum(found)} tokens, more than the budget"
    if not sum(found):
        return "schedule gives nobody a token, so that nothing goes on"
    return ""


class Simulated:
    """A loop with `places`: requests wait, enter, feed and end. Each gains a token a step."""

    def __init__(
        self, schedule: Schedule, *, places: int, budget: int, chunk: int = 1 << 20,
        watches: bool = False,
    ) -> None:  # fmt: skip
        self.held = Held(schedule, watches=watches)
        self.places, self.budget, self.chunk = places, budget, chunk
        self.waiting: WaitingQueue[Lent] = WaitingQueue(self.held)
        self.running: list[Lent] = []
        self.ended: list[Lent] = []
        self.entered: list[int] = []
        self.idle: dict[int, int] = {}  # how often in a row one that runs got nothing
        self.steps = 0
        self._numbers = 0

    @property
    def now(self) -> float:
        """What its clock says: every step takes as long."""
        return self.steps * STEP

    def submit(self, prompt: int = 4, new: int = 2, **asked: Any) -> Lent:
        """A request of so many tokens."""
        self._numbers += 1
        sequence = lend(self._numbers, [5] * prompt, max_new_tokens=new, arrival=self.now, **asked)
        self.waiting.add(sequence)
        return sequence

    def preempt(self, sequence: Lent) -> None:
        """Its memory is taken: it waits again, and is read again from its beginning."""
        self.running.remove(sequence)
        sequence.num_cached = 0
        sequence.preemptions += 1
        self.waiting.add(sequence)

    def step(self) -> None:
        """One step of the loop; somebody waits or runs."""
        self.waiting.rank()
        while len(self.running) < self.places and self.waiting:
            first = self.waiting.first(self.now)
            assert first is not None
            self.waiting.discard(first)
            self.running.append(first)
            self.entered.append(first.id)
        uncached = [min(len(s.tokens) - s.num_cached, self.chunk) for s in self.running]
        counts = self.held.schedule(self.running, uncached, self.budget, self.now)
        self.steps += 1
        for sequence, count in zip(list(self.running), counts, strict=True):
            self.idle[sequence.id] = 0 if count else self.idle.get(sequence.id, 0) + 1
            sequence.num_cached += count
            if sequence.num_cached == len(sequence.tokens):
                grow(sequence, [5])
            if sequence.num_new == sequence.settings.max_new_tokens:
                self.running.remove(sequence)
                self.idle.pop(sequence.id, None)
                self.ended.append(sequence)

    def starved(self, sequence: Lent) -> str | None:
        """Why an engine would end it."""
        waited = self.now - sequence.arrival
        if self.idle.get(sequence.id, 0) > FOR_EVER and waited > 2 * self.held.patience:
            return f"ran, and got no token in {self.idle[sequence.id]} steps in a row"
        return None
