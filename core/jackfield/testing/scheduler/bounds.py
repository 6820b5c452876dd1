"""Checks of what a scheduler returns: everybody once, and tokens within the budget."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from jackfield.errors import JackfieldError
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.lent import Lent, grow, lend
from jackfield.testing.scheduler.simulation import Held, bind
from jackfield.testing.subject import Subject

MANY = 10_000
SLOW = 0.5  # seconds of processor time, for one call, or a key for each of `MANY`

#: Uncached tokens of each that runs, and a budget: from the smallest up.
STEPS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 1), ((1,), 64), ((2,), 1), ((5,), 3), ((5,), 5), ((5,), 1 << 62),
    ((1, 1), 2), ((1, 5), 1), ((5, 1), 1), ((1, 5), 2), ((5, 1), 2), ((5, 1), 3), ((2, 2), 1),
    ((5, 5), 7), ((5, 5), 10), ((9, 1, 4), 3), ((1, 1, 9, 4), 4), ((9, 4, 1, 1), 5),
    ((3, 1, 3, 1, 3), 6), ((64, 64, 1, 64, 1), 66), ((7, 7, 7), 20), ((7, 7, 7), 21),
    ((7, 7, 7), 22), ((1,) * 30, 30),
    ((500, *(1,) * 40), 41), ((*(1,) * 40, 500), 2048),
)  # fmt: skip


def checks(subject: Subject) -> Iterator[Check]:
    """What `key` and `schedule` may return, and that they change nothing."""
    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "key.numbers": (_numbers, (1, 5, 60)),
        "key.presented": (_presented, (2, 3, 4)),
        "key.priorities": (_priorities, ("two", "in another order", "negative", "many")),
        "key.patience": (_patience, ("",)),
        "key.many": (_many_waiting, (MANY,)),
        "schedule.bounds": (_bounds, STEPS),
        "schedule.read_again": (_read_again, STEPS),
        "schedule.rows": (_rows, (2, 3, 4)),
        "schedule.drawn": (_drawn, (10, 100, 1000)),
        "schedule.unchanged": (_schedule_unchanged, (1, 4)),
        "schedule.again": (_again, (2, 5)),
        "schedule.whole_chunks": (_whole_chunks, (1, 2, 5)),
        "schedule.many": (_many_running, (1000,)),
    }
    for name, (run, cases) in every.items():
        yield Check(name, "contract", functools.partial(run, subject), cases)


def _drawn_request(number: int, numbers: random.Random, now: int) -> Lent:
    prompt = numbers.choice((1, 2, 5, 17, 300))
    sequence = lend(
        number,
        [5] * prompt,
        max_new_tokens=numbers.choice((1, 4, 100)),
        arrival=numbers.randint(0, now),
        priority=numbers.choice((-3, 0, 0, 0, 7)),
        cache_salt=numbers.choice(("", "a")),
        deadline=numbers.choice((None, 5.0)),
    )
    if numbers.random() < 0.3:  # one whose memory was taken
        grow(sequence, [6] * numbers.choice((1, 3)))
        sequence.num_cached, sequence.preemptions = 0, 1
    return sequence


def _numbers(subject: Subject, count: int) -> None:
    numbers = subject.random(f"numbers {count}")
    held = Held(bind(subject))
    for now in (0, 1, 5, 1_000, 100_000):
        for number in range(count):
            held.key(_drawn_request(number, numbers, now))


def _presented(subject: Subject, count: int) -> None:
    """Each order in which they may come, and two schedulers that are asked the same."""
    waiting = [lend(n, [5] * (1 + n), arrival=n) for n in range(count)]
    one, other = Held(bind(subject)), Held(bind(subject))
    for presented in itertools.permutations(waiting):
        found = [
            [s.id for s in sorted(presented, key=lambda s: (held.key(s), s.id))]
            for held in (one, other)
        ]
        if found[0] != found[1]:
            raise WrongError(
                f"two schedules that are asked the same order requests as {found[0]} and as "
                f"{found[1]}: what runs cannot be run again"
            )


_PRIORITIES = {"two": (0, 1), "in another order": (1, 0), "negative": (-1, 0, -5), "many": range(9)}


def _priorities(subject: Subject, case: str) -> None:
    """Of those that came together, and differ in nothing else."""
    held = Held(bind(subject))
    waiting = [lend(n, [5] * 4, arrival=3, priority=p) for n, p in enumerate(_PRIORITIES[case])]
    for presented in (waiting, waiting[::-1]):
        keys = [(s.settings.priority, held.key(s)) for s in presented]
        for (first, before), (second, after) in itertools.permutations(keys, 2):
            if first > second and not before < after:
                raise WrongError(
                    f"a request of priority {second}, of key {after}, goes before one of priority "
                    f"{first}, of key {before}, that came together with it"
                )


def _patience(subject: Subject, _: object) -> str:
    return f"{Held(bind(subject)).patience:g} s"


def _many_waiting(subject: Subject, count: int) -> str:
    numbers = subject.random("many")
    waiting = [_drawn_request(n, numbers, 50) for n in range(count)]
    held = Held(bind(subject), watches=False)
    took = _took(lambda: [held.key(sequence) for sequence in waiting])
    if took > SLOW:
        raise WrongError(f"key takes {took:.1f} s for {count} requests")
    return f"{1e6 * took / count:.2g} us for each of {count} that wait"


def _many_running(subject: Subject, count: int) -> str:
    running, uncached = _running([1 + 40 * (n % 3 == 0) for n in range(count)])
    held = Held(bind(subject), watches=False)
    held.schedule(running[:3], uncached[:3], 100, 1)
    took = _took(lambda: held.schedule(running, uncached, 2 * count, 2))
    if took > SLOW:
        raise WrongError(f"schedule takes {took:.1f} s for {count} that run, in every step")
    return f"{1000 * took:.2g} ms for {count} that run"


def _took(act: Any) -> float:
    begin = time.thread_time()
    act()
    return time.thread_time() - begin


def _running(counts: Any, first: int = 0) -> tuple[list[Lent], list[int]]:
    """Sequences with so many tokens that are not cached; one of one token decodes."""
    running = []
    for number, count in enumerate(counts, first):
        sequence = lend(number, [5] * (count + 7 * (number % 2)), max_new_tokens=200)
        sequence.num_cached = len(sequence.tokens) - count
        if count == 1:
            grow(sequence, [6])
        running.append(sequence)
    return running, list(counts)


def _bounds(subject: Subject, case: tuple[tuple[int, ...], int]) -> None:
    counts, budget = case
    held = Held(bind(subject))
    running, uncached = _running(counts)
    for now in (0, 1, 2, 3, 1_000, 100_000):
        held.schedule(running, uncached, budget, now)


def _read_again(subject: Subject, case: tuple[tuple[int, ...], int]) -> None:
    """The same of sequences that were preempted: what they generated is read again too."""
    counts, budget = case
    held = Held(bind(subject))
    running, uncached = _running(counts)
    for sequence, count in zip(running, counts, strict=True):
        if count > 1:
            grow(sequence, [6] * (1 + count // 2))
            sequence.num_cached, sequence.preemptions = len(sequence.tokens) - count, 1
    for now in (0, 1, 1_000):
        held.schedule(running, uncached, budget, now)


def _rows(subject: Subject, count: int) -> None:
    """Rows stand in the order in which sequences entered: prompts may be before decoders."""
    running, uncached = _running([1, 6, 1, 9][:count])
    held = Held(bind(subject))
    pairs = list(zip(running, uncached, strict=True))
    for now, rows in enumerate(itertools.permutations(pairs)):
        held.schedule([s for s, _ in rows], [n for _, n in rows], 1 + count, now)


def _drawn(subject: Subject, times: int) -> None:
    numbers = subject.random(f"drawn {times}")
    held = Held(bind(subject), watches=times < 500)
    for now in range(times):
        counts = [numbers.choice((1, 1, 1, 2, 5, 33)) for _ in range(numbers.randint(1, 9))]
        running, uncached = _running(counts, first=now)
        least = max(1, counts.count(1))
        held.schedule(running, uncached, numbers.choice((least, least + 1, 16 + least, 500)), now)


def _schedule_unchanged(subject: Subject, count: int) -> None:
    held = Held(bind(subject), lists=True)
    running, uncached = _running([1, 8, 1, 3][:count])
    for now in range(5):
        held.schedule(running, uncached, 6, now)


def _again(subject: Subject, count: int) -> None:
    """After a preemption it is asked again in the same step, for one sequence less."""
    held = Held(bind(subject))
    running, uncached = _running([1, 12, 1, 4, 1][:count])
    while running:
        held.schedule(running, uncached, 9, 4)
        gone = running.pop()
        uncached.pop()
        gone.num_cached, gone.preemptions = 0, 1
        held.key(gone)


def _whole_chunks(subject: Subject, count: int) -> None:
    """With deterministic=True a prompt is fed a whole chunk or nothing."""
    chunk = 16
    try:
        held = Held(bind(subject, deterministic=True))
    except JackfieldError as error:
        raise NotTriedError(f"is refused with deterministic=True: {error}") from None
    numbers = subject.random("whole chunks")
    for now in range(60):
        counts = [numbers.choice((1, 1, 3, chunk)) for _ in range(count)]
        running, uncached = _running(counts)
        found = held.schedule(running, uncached, numbers.choice((count + chunk, 500)), now)
        if not any(got == most for got, most in zip(found, uncached, strict=True)):
            raise WrongError(
                f"schedule gives {found} of {uncached} uncached tokens: with deterministic=True "
                "nobody goes on who does not get all of them"
            )
