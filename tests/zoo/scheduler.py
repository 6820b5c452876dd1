"""Wrong schedulers: what an honest author gets wrong, and what no author should do."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from wrong import Wrong
from wrong_choices import SCHEDULERS, scheduler

from jackfield.contracts import Schedule, Scheduler


class Right(Schedule):
    """By priority, then first come, first served; who decodes goes first."""

    def key(self, sequence: Any) -> Any:
        return (-sequence.settings.priority, sequence.arrival, sequence.id)

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


def keyed(key: Callable[[Any], Any], patience: Any = 5.0) -> Callable[[], Scheduler]:
    class Keyed(Right):
        def key(self, sequence: Any) -> Any:
            return key(sequence)

    Keyed.patience = patience
    return of(Keyed)


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


def _by_new_tokens(running: Any, uncached: Any, budget: int, now: float) -> Any:
    """Who has generated anything is thought to decode, also after a preemption."""
    found = [count if s.num_new else 0 for s, count in zip(running, uncached, strict=True)]
    left = budget - sum(found)
    for row, count in enumerate(uncached):
        if not running[row].num_new:
            found[row] = max(0, min(count, left))
            left -= found[row]
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

    def key(self, sequence: Any) -> Any:
        self.seen.append(sequence)
        return super().key(sequence)


class Counts(Right):
    """Keeps a number for each request that ever was."""

    def __init__(self) -> None:
        self.turns: dict[int, list[int]] = {}

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        for s in running:
            self.turns.setdefault(s.id, []).append(now)
        return super().schedule(running, uncached, budget, now)


class Blocks(Right):
    """Keeps a record of each request for ever, in blocks of 256."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytearray] = {}

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        for s in running:
            if s.id // 256 not in self.blocks:
                self.blocks[s.id // 256] = bytearray(256 * 100)
        return super().schedule(running, uncached, budget, now)


class Shared(Right):
    """What is kept is kept for all engines."""

    first: dict[int, int] = {}  # noqa: RUF012 - that is its fault

    def key(self, sequence: Any) -> Any:
        if len(self.first) > 3000:
            self.first.clear()
        self.first.setdefault(sequence.id, len(self.first))
        return (-sequence.settings.priority, self.first[sequence.id])


class Slow(Right):
    """Looks at all whom it knows to place one more."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def key(self, sequence: Any) -> Any:
        self.known.append(sequence)
        return (-sequence.settings.priority, sum(s.arrival < sequence.arrival for s in self.known))


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


def _tidied(sequence: Any) -> Any:
    sequence.tokens.sort()
    return (-sequence.settings.priority, len(sequence.tokens))


_NUMBERS = "key must return a tuple of numbers"
_SECONDS = "patience is .*seconds"

BY_HAND = (
    Wrong("priorities upside down", keyed(lambda s: (s.settings.priority, s.arrival)), "priority"),
    Wrong("priorities as text", keyed(lambda s: (str(-s.settings.priority), s.arrival)), _NUMBERS),
    Wrong("priorities as truth", keyed(lambda s: (not s.settings.priority, s.arrival)), "priority"),
    Wrong("no priorities", keyed(lambda s: (s.arrival,)), "priority"),
    Wrong("no key at all", keyed(lambda s: ()), "priority"),
    Wrong("length before priority", keyed(lambda s: (len(s.tokens), s.settings.priority)),
          "priority"),
    Wrong("a number for a tuple", keyed(lambda s: -s.settings.priority), _NUMBERS),
    Wrong("a list for a tuple", keyed(lambda s: [-s.settings.priority, s.arrival]), _NUMBERS),
    Wrong("the request in its key", keyed(lambda s: (-s.settings.priority, s)), _NUMBERS),
    Wrong("a key in a key", keyed(lambda s: (-s.settings.priority, (s.arrival, s.id))), _NUMBERS),
    Wrong("no deadline as None", keyed(lambda s: (-s.settings.priority, s.settings.deadline)),
          _NUMBERS),
    Wrong("no deadline as NaN",
          keyed(lambda s: (-s.settings.priority, s.settings.deadline or math.nan)), "NaN"),
    Wrong("a priority that is None for one that was preempted",
          keyed(lambda s: None if s.preemptions else (-s.settings.priority, s.id)), _NUMBERS),
    Wrong("a rate of what is cached",
          keyed(lambda s: (-s.settings.priority, len(s.tokens) / s.num_cached)), "ZeroDivision"),
    Wrong("sorts the tokens", keyed(_tidied), "for reading|changed|tokens"),
    Wrong("drawn by chance", keyed(lambda s: (-s.settings.priority, _random.random())),
          "two schedules|another order"),
    Wrong("by the address in memory",
          keyed(lambda s: (-s.settings.priority, id(s) * 2654435761 % 2**32)),
          "two schedules|another order|another engine"),
    Wrong("takes seconds for thousands", of(Slow), "takes .* s for|keeps"),
    Wrong("no patience", keyed(lambda s: (-s.settings.priority, s.id), 0), _SECONDS),
    Wrong("patience below zero", keyed(lambda s: (-s.settings.priority, s.id), -1.0), _SECONDS),
    Wrong("patience without an end", keyed(lambda s: (-s.settings.priority, s.id), math.inf),
          _SECONDS),
    Wrong("patience as NaN", keyed(lambda s: (-s.settings.priority, s.id), math.nan), _SECONDS),
    Wrong("patience as text", keyed(lambda s: (-s.settings.priority, s.id), "10 s"), _SECONDS),
    Wrong("patience as None", keyed(lambda s: (-s.settings.priority, s.id), None), _SECONDS),
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
    Wrong("new tokens are decoders", giving(_by_new_tokens), "schedule spends"),
    Wrong("prompts when nobody decodes", giving(lambda r, uncached, budget, now: [
        int(n == 1) for n in uncached] if 1 in uncached else _spent(r, uncached, budget, now)),
          "starves"),
    Wrong("keeps who it has seen", of(Remembers), "keeps"),
    Wrong("keeps a number for each", of(Counts), "keeps|memory"),
    Wrong("keeps a record of each in blocks", of(Blocks), "memory grows"),
    Wrong("keeps it for all engines", of(Shared),
          "another engine|two schedules|another order|keeps"),
    Wrong("writes into requests", of(Marks), "changed request"),
    Wrong("fails from the hundredth second on", giving(lambda r, uncached, b, s:
          Right().schedule(r, uncached, b, s)[: 1 << (20 - min(20, int(s / 5)))]), "numbers for"),
)  # fmt: skip

#: What the guards of an engine are shown to find, too.
GUARDED = tuple(
    Wrong(name, lambda members=members: scheduler(**members),  # type: ignore[misc]
          "key|schedule|changed|raised|attribute|assign|refuse|settings|tokens")
    for name, members in SCHEDULERS.items()
)  # fmt: skip

ZOO: tuple[Wrong, ...] = tuple(itertools.chain(BY_HAND, GUARDED))
