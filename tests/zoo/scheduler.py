"""Wrong schedulers: what an honest author gets wrong, and what no author should do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from wrong import Wrong
from wrong_choices import SCHEDULERS, scheduler

from jackfield.contracts import Schedule, Scheduler


class Right(Schedule):
    """By priority, then first come, first served; who decodes goes first."""

    def order(self, waiting: Any, now: float) -> Any:
        return sorted(waiting, key=lambda s: (-s.settings.priority, s.arrival, s.id))

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        counts = [int(count == 1) for count in uncached]
        left = budget - sum(counts)
        for row, count in enumerate(uncached):
            if count > 1:
                counts[row] = min(count, left)
                left -= counts[row]
        return counts


def of(schedule: type[Schedule]) -> Callable[[], Scheduler]:
    class Made(Scheduler):
        name = "wrong"

        def bind(self, context: Any) -> Any:
            return schedule()

    return Made


def ordering(order: Callable[[Any, float], Any]) -> Callable[[], Scheduler]:
    class Ordering(Right):
        def order(self, waiting: Any, now: float) -> Any:
            return order(waiting, now)

    return of(Ordering)


def by(key: Callable[[Any], Any]) -> Callable[[], Scheduler]:
    """Priority, and then something else than who came first."""
    return ordering(
        lambda waiting, _: sorted(waiting, key=lambda s: (-s.settings.priority, key(s)))
    )


def giving(schedule: Callable[[Any, Any, int, float], Any]) -> Callable[[], Scheduler]:
    class Giving(Right):
        def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
            return schedule(running, uncached, budget, now)

    return of(Giving)


def _spent(running: Any, uncached: Any, budget: int, now: float) -> Any:
    """Prompts first: nothing is kept for those that decode."""
    found = []
    for count in uncached:
        found.append(min(count, budget))
        budget -= found[-1]
    return found


def _over(running: Any, uncached: Any, budget: int, now: float) -> Any:
    """The budget is looked at before a prompt is taken, not after."""
    found, spent = [], 0
    for count in uncached:
        found.append(count if spent < budget else 0)
        spent += found[-1]
    return found


def _shared(running: Any, uncached: Any, budget: int, now: float) -> Any:
    """An equal share each, which may round to nothing."""
    return [min(count, budget // len(uncached) // 2) for count in uncached]


def _equal(running: Any, uncached: Any, budget: int, now: float) -> Any:
    return [min(count, max(1, budget // len(uncached))) for count in uncached]


class TakesTurns(Right):
    """Everybody in turn, by a number that is kept from call to call."""

    last = 0

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        self.last += 1
        return [min(n, budget) * (i == self.last) for i, n in enumerate(uncached)]


class OnlyWhenPrompts(Right):
    """Prompts are read alone; nobody decodes in the meantime, and then nobody goes on."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        left = budget
        found = [0] * len(uncached)
        for row, count in enumerate(uncached):
            if count > 1:
                found[row] = min(count, left)
                left -= found[row]
        return found


class Newest(Right):
    """Prompts: the newest first, so that the oldest is never read."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        counts = [int(count == 1) for count in uncached]
        left = budget - sum(counts)
        for row in reversed(range(len(uncached))):
            if uncached[row] > 1:
                counts[row] = min(uncached[row], left)
                left -= counts[row]
        return counts


class Remembers(Right):
    """Keeps who it has seen."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def order(self, waiting: Any, now: float) -> Any:
        self.seen += [s for s in waiting if s not in self.seen[-50:]]
        return super().order(waiting, now)


class Counts(Right):
    """Keeps a number for each request that ever was."""

    def __init__(self) -> None:
        self.turns: dict[int, list[int]] = {}

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        for s in running:
            self.turns.setdefault(s.id, []).append(now)
        return super().schedule(running, uncached, budget, now)


class Shared(Right):
    """What is kept is kept for all engines."""

    first: dict[int, int] = {}  # noqa: RUF012 - that is its fault

    def order(self, waiting: Any, now: float) -> Any:
        for s in waiting:
            self.first.setdefault(s.id, len(self.first))
            if len(self.first) > 3000:
                self.first.clear()
        return sorted(waiting, key=lambda s: (-s.settings.priority, self.first.get(s.id, 0)))


class Slow(Right):
    def order(self, waiting: Any, now: float) -> Any:
        found: list[Any] = []
        for s in waiting:
            place = sum(1 for other in found if other.arrival <= s.arrival)
            found.insert(place, s)
        return sorted(found, key=lambda s: -s.settings.priority)


class Cached(Right):
    """Orders those that it was first asked about."""

    known: Any = None

    def order(self, waiting: Any, now: float) -> Any:
        self.known = self.known or super().order(waiting, now)
        return self.known


class Batches(Right):
    """Lets nobody in while somebody runs: it says so by ordering nobody."""

    busy = False

    def order(self, waiting: Any, now: float) -> Any:
        return [] if self.busy else super().order(waiting, now)

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        self.busy = len(running) > 1
        return super().schedule(running, uncached, budget, now)


class Marks(Right):
    """Writes into requests whose turn it was."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        for s in running:
            if s.preemptions:
                s.preemptions = 0
        return super().schedule(running, uncached, budget, now)


class CutsChunks(Right):
    """A prompt never gets all that it lacks."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        return [1 if n == 1 else n // 2 for n in uncached] if sum(uncached) <= budget else (
            super().schedule(running, uncached, budget, now)
        )  # fmt: skip


class ExpectsDecodersFirst(Right):
    """Takes the first rows for those that decode."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        decoding = sum(n == 1 for n in uncached)
        counts = [1] * decoding
        left = budget - decoding
        for count in uncached[decoding:]:
            counts.append(min(count, left) if count > 1 else 1)
            left -= counts[-1]
        return counts


_random = random.Random()


def _shuffled(waiting: Any, now: float) -> Any:
    found = list(waiting)
    _random.shuffle(found)
    return sorted(found, key=lambda s: -s.settings.priority)


def _in_place(waiting: Any, now: float) -> Any:
    waiting.sort(key=lambda s: s.arrival)
    return waiting


def _dropped(waiting: Any, now: float) -> Any:
    return [s for s in waiting if len(s.tokens) < 100] if len(waiting) > 1 else list(waiting)


def _first_of_all(waiting: Any, now: float) -> Any:
    first = max(waiting, key=lambda s: s.settings.priority)
    return [first, *sorted((s for s in waiting if s is not first), key=lambda s: s.arrival)]


def _by_length(waiting: Any, now: float) -> Any:
    return list({len(s.tokens): s for s in waiting}.values())


_STARVED = "starves|overtaken"
_ORDERED = "order must return each"

BY_HAND = (
    Wrong("the newest first", by(lambda s: -s.id), _STARVED),
    Wrong("the latest arrival first", by(lambda s: -s.arrival), _STARVED),
    Wrong("short prompts first for ever", by(lambda s: len(s.tokens)), _STARVED),
    Wrong("long prompts first for ever", by(lambda s: -len(s.tokens)), _STARVED),
    Wrong("short texts first for ever", by(lambda s: s.settings.max_new_tokens), _STARVED),
    Wrong("long texts first for ever", by(lambda s: -s.settings.max_new_tokens), _STARVED),
    Wrong("the nearest deadline first", by(lambda s: s.settings.deadline or 1e9), _STARVED),
    Wrong("preempted ones last", by(lambda s: (s.preemptions, s.arrival)), _STARVED),
    Wrong("samples last", by(lambda s: (s.sample, s.arrival)), _STARVED),
    Wrong("one salt before the others", by(lambda s: (s.settings.cache_salt != "same", s.id)),
          _STARVED),
    Wrong("priorities upside down",
          ordering(lambda w, _: sorted(w, key=lambda s: (s.settings.priority, s.arrival))),
          "priority"),
    Wrong("priorities as text",
          ordering(lambda w, _: sorted(w, key=lambda s: (str(-s.settings.priority), s.arrival))),
          "priority"),
    Wrong("priorities as truth",
          ordering(lambda w, _: sorted(w, key=lambda s: (not s.settings.priority, s.arrival))),
          "priority"),
    Wrong("no priorities", ordering(lambda w, _: sorted(w, key=lambda s: s.arrival)), "priority"),
    Wrong("leaves out long ones", ordering(_dropped), _ORDERED),
    Wrong("one of each length", ordering(_by_length), _ORDERED),
    Wrong("an iterator that was read", ordering(lambda w, _: (iter(w), iter([]))[1]), _ORDERED),
    Wrong("sorts in place", ordering(_in_place), "sort|changed the list"),
    Wrong("drawn by chance", ordering(_shuffled), "two schedules|another order"),
    Wrong("by the address in memory", by(lambda s: id(s) * 2654435761 % 2**32), "two schedules|"
          "another order|starves|another engine"),
    Wrong("orders tuples", ordering(lambda w, _: [(s.arrival, s) for s in w]), _ORDERED),
    Wrong("fails where nobody waits", ordering(_first_of_all), "empty|raised"),
    Wrong("orders those of before", of(Cached), _ORDERED),
    Wrong("orders nobody while it is busy", of(Batches), _ORDERED),
    Wrong("takes seconds for thousands", of(Slow), "takes .* s for"),
    Wrong("budget looked at too late", giving(_over), "more than the budget"),
    Wrong("no budget", giving(lambda r, uncached, b, s: list(uncached)), "more than the budget"),
    Wrong("budget for each", giving(lambda r, n, b, s: [min(one, b) for one in n]),
          "more than the budget"),
    Wrong("one more than the budget", giving(lambda r, n, b, s: _spent(r, n, b + 1, s)),
          "more than the budget"),
    Wrong("shares that round to nothing", giving(_shared), "nobody a token"),
    Wrong("shares that are too many", giving(lambda r, uncached, b, s: [1] * len(uncached)),
          "more than the budget|^$"),
    Wrong("turns that run out", of(TakesTurns), "nobody a token"),
    Wrong("waits for prompts", of(OnlyWhenPrompts), "nobody a token"),
    Wrong("the newest prompt first", of(Newest), "starves"),
    Wrong("chunks in halves", of(CutsChunks), "deterministic|nobody a token"),
    Wrong("decoders are the first rows", of(ExpectsDecodersFirst), "schedule gives|budget|nobody"),
    Wrong("a whole prompt or nothing", giving(lambda r, uncached, b, s:
          [n if sum(uncached[:i + 1]) <= b else 0 for i, n in enumerate(uncached)]),
          "nobody a token"),
    Wrong("tokens as a dict", giving(lambda r, uncached, b, s:
          {x.id: n for x, n in zip(r, Right().schedule(r, uncached, b, s), strict=True)}),
          "schedule (gives|returned)|budget"),
    Wrong("tokens as floats", giving(lambda r, uncached, b, s:
          [min(n, b / len(uncached)) for n in uncached]), "no whole number"),
    Wrong("counts for who gets some", giving(lambda r, uncached, b, s:
          [n for n in Right().schedule(r, uncached, b, s) if n]), "numbers for"),
    Wrong("keeps who it has seen", of(Remembers), "keeps"),
    Wrong("keeps a number for each", of(Counts), "keeps|memory"),
    Wrong("keeps it for all engines", of(Shared),
          "another engine|two schedules|another order|keeps"),
    Wrong("writes into requests", of(Marks), "changed request"),
    Wrong("fails from the hundredth second on", giving(lambda r, uncached, b, s:
          Right().schedule(r, uncached, b, s)[: 1 << (20 - min(20, int(s / 5)))]), "numbers for"),
)  # fmt: skip

#: What the guards of an engine are shown to find, too.
GUARDED = tuple(
    Wrong(name, lambda members=members: scheduler(**members),  # type: ignore[misc]
          "order|schedule|changed|raised|attribute|assign|refuse|settings|tokens")
    for name, members in SCHEDULERS.items()
)  # fmt: skip

ZOO: tuple[Wrong, ...] = tuple(itertools.chain(BY_HAND, GUARDED))
