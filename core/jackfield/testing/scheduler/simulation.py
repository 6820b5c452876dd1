"""What a scheduler sees of an engine, without a model: who waits, who runs, and for how long."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from jackfield.api import plan
from jackfield.contracts import BindContext, Requirements, Schedule, Sequence
from jackfield.engine.checked_schedule import FOR_EVER, LONG
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

    def order(self, waiting: Seq[Sequence], now: float) -> list[Any]:
        """Who enters first."""
        given = self._kind(waiting)
        watch = Watch(waiting if self._watches else ())
        said = self._schedule.order(given, now)
        found = _listed(said, len(waiting) + 1, "order")
        watch.check("order")
        if list(given) != list(waiting):
            raise WrongError("order changed the list of those that wait, to be read")
        if len(found) != len(waiting) or set(map(id, found)) != set(map(id, waiting)):
            known = set(map(id, waiting))
            once = len({id(s) for s in found} & known)
            raise WrongError(
                f"order must return each of the {len(waiting)} that wait once; got {len(found)}, "
                f"{once} of them different ones that wait"
            )
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
        self.waiting: dict[int, Lent] = {}
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
        self.waiting[sequence.id] = sequence
        return sequence

    def preempt(self, sequence: Lent) -> None:
        """Its memory is taken: it waits again, and is read again from its beginning."""
        self.running.remove(sequence)
        sequence.num_cached = 0
        sequence.preemptions += 1
        self.waiting[sequence.id] = sequence

    def step(self) -> None:
        """One step of the loop; somebody waits or runs."""
        free = self.places - len(self.running)
        if free and self.waiting:
            for one in self.held.order(list(self.waiting.values()), self.now)[:free]:
                self.running.append(self.waiting.pop(one.id))
                self.entered.append(one.id)
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

    def starved(self, sequence: Lent, overtaken: int) -> str | None:
        """Why an engine would end it; `overtaken`: how often later ones entered before it."""
        waited = self.now - sequence.arrival
        if sequence.id in self.waiting and waited > LONG and overtaken > FOR_EVER:
            return (
                f"waited {waited:.0f} s and was overtaken by {overtaken} later requests of no "
                "higher priority"
            )
        if self.idle.get(sequence.id, 0) > FOR_EVER:
            return f"ran, and got no token in {self.idle[sequence.id]} steps in a row"
        return None
