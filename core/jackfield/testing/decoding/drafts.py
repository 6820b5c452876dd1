"""Checks of strategies that draft: called directly, with texts whose continuation is known."""

from __future__ import annotations

import functools
import gc
import math
import random
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jackfield.testing.checks import Check, WrongError
from jackfield.testing.decoding.rehearsal import Rehearsal, repeating, truth
from jackfield.testing.lent import grow
from jackfield.testing.memory import growth, quick_collection
from jackfield.testing.models import VOCAB
from jackfield.testing.subject import Subject

CAPABILITY = "rollback"
LONG = 6000  # tokens
SLOW = 0.1  # seconds of processor time, for one call
EVIDENCE = 5  # drafts of three tokens and more, before their place is judged


def checks(subject: Subject) -> Iterator[Check]:
    """What a strategy that declares `rollback` must do, whatever it guesses."""
    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "shape": (_shape, ((1, 1), (1, 2), (2, 1), (3, 5), (7, 100))),
        "unchanged": (_unchanged, (1, 2, 5)),
        "odd_texts": (_odd_texts, tuple(ODD)),
        "rows": (_rows, (2, 3, 6)),
        "proposes": (_proposes, ("",)),
        "place": (_place, ("",)),
        "traffic": (_traffic, (1, 2, 6)),
        "max_drafts": (_max_drafts, ("",)),
        "release": (_release, (1, 3)),
        "release_unknown": (_release_unknown, ("",)),
        "release_some": (_release_some, ("",)),
        "forgets": (_forgets, ("",)),
        "two_engines": (_two_engines, ("",)),
        "rate": (_rate, ("",)),
        "time": (_time, ("",)),
    }
    if subject.backend.capabilities.heads:
        del every["max_drafts"]  # a plan counts the heads
    for name, (run, cases) in every.items():
        yield Check(f"drafts.{name}", CAPABILITY, functools.partial(run, subject), cases)


def _shape(subject: Subject, case: tuple[int, int]) -> None:
    rows, room = case
    rehearsal = Rehearsal(subject)
    sequences = [rehearsal.lend(n, repeating(n, 3, 14 + n)) for n in range(rows)]
    rehearsal.propose(sequences, [room] * rows)
    rehearsal.propose(sequences[::-1], [1 + (room + n) % (room + 1) for n in range(rows)])


def _unchanged(subject: Subject, rows: int) -> None:
    rehearsal = Rehearsal(subject)
    sequences = [rehearsal.lend(n, repeating(n, 4, 40 + n)) for n in range(rows)]
    for number in range(6):
        rehearsal.propose(sequences, [4] * rows, lists=number % 2 == 0)
    rehearsal.release(sequences[:1])


#: texts that are easily forgotten
ODD = {
    "one token": [5],
    "two tokens": [5, 6],
    "the first token of the vocabulary": [0] * 9,
    "the last token of the vocabulary": [VOCAB - 1] * 9,
    "one token for ever": [7] * 50,
    "no token twice": list(range(VOCAB)),
    "a repetition across the whole text": [*range(20), *range(20)],
    "random tokens": random.Random(3).choices(range(VOCAB), k=200),
}


def _odd_texts(subject: Subject, case: str) -> None:
    rehearsal = Rehearsal(subject)
    sequence = rehearsal.lend(1, ODD[case])
    for room in (1, 5, 1000):
        rehearsal.propose([sequence], [room])


def _rows(subject: Subject, rows: int) -> None:
    """Of texts that have no token in common; what one is told must not stand at another's place."""
    alone = []
    for number in range(rows):
        rehearsal = Rehearsal(subject)
        sequence = rehearsal.lend(number, repeating(number, 3 + number, 40))
        alone.append(rehearsal.propose([sequence], [6])[0])
    rehearsal = Rehearsal(subject)
    sequences = [rehearsal.lend(n, repeating(n, 3 + n, 40)) for n in range(rows)]
    for order in (range(rows), range(rows)[::-1]):
        found = rehearsal.propose([sequences[n] for n in order], [6] * rows)
        for place, (number, drafts) in enumerate(zip(order, found, strict=True)):
            if not drafts or drafts == alone[number]:
                continue
            if (other := next((n for n in order if alone[n] == drafts), None)) is not None:
                raise WrongError(
                    f"sequence {place} of {rows} gets the drafts of sequence "
                    f"{list(order).index(other)}: drafts must be in the order of the sequences"
                )


def _proposes(subject: Subject, _: object) -> str:
    rehearsal = Rehearsal(subject)
    for number, period in enumerate((1, 2, 3, 5, 8, 12)):
        sequence = rehearsal.lend(number, repeating(number, period, 10 * period))
        for _ in range(4):
            rehearsal.propose([sequence], [8])
            grow(sequence, truth(sequence, 1))
    for number in range(6, 10):
        text = rehearsal.subject.random(str(number)).choices(range(VOCAB), k=60)
        rehearsal.propose([rehearsal.lend(number, text)], [8])
    if not rehearsal.drafted:
        raise WrongError(
            f"declares rollback, and proposed nothing in {rehearsal.calls} calls, also where a "
            "text repeats itself"
        )
    return f"{rehearsal.drafted} drafts in {rehearsal.calls} calls"


def _place(subject: Subject, _: object) -> str:
    """Whether drafts begin where the text ends: a usual mistake is one token off."""
    rehearsal = Rehearsal(subject)
    fits: Counter[str] = Counter()
    for number in range(6):
        sequence = rehearsal.lend(number, repeating(number, 5 + number, 50 + number))
        for _ in range(3):
            drafts = rehearsal.propose([sequence], [5])[0]
            if len(drafts) >= 3:
                fits["all"] += 1
                fits[_how_they_lie(drafts, sequence)] += 1
            grow(sequence, truth(sequence, 1))
    for how in ("late", "early", "back to front"):
        if fits["all"] >= EVIDENCE and fits[how] >= 0.8 * fits["all"]:
            count = f"{fits[how]} of {fits['all']}"
            raise WrongError(f"{count} drafts would be right, but {WRONG_PLACE[how]}")
    return f"{fits['right']} of {fits['all']} drafts right where a text repeats itself"


WRONG_PLACE = {
    "late": "begin with the token that the text ends in already: drafts come behind it",
    "early": "leave out the next token: the first draft comes right behind the last token",
    "back to front": "are back to front: the next token comes first",
}


def _how_they_lie(drafts: list[int], sequence: Any) -> str:
    right = truth(sequence, len(drafts) + 1)
    shapes = {
        "right": right[:-1],
        "late": [sequence.tokens[-1], *right[:-2]],
        "early": right[1:],
        "back to front": right[-2::-1],
    }
    return next((how for how, tokens in shapes.items() if tokens == drafts), "other")


def _traffic(subject: Subject, rows: int) -> None:
    """Sequences rest, begin anew after a preemption, end, and others come."""
    numbers = subject.random(f"traffic {rows}")
    rehearsal = Rehearsal(subject)
    for wave in range(4):
        first = wave * rows
        sequences = [
            rehearsal.lend(first + n, repeating(n, 2 + (n + wave) % 6, 5 + 7 * n))
            for n in range(rows)
        ]
        rehearsal.traffic(sequences, 12, numbers)
        rehearsal.release(sequences)


def _max_drafts(subject: Subject, _: object) -> str:
    """More would not have the memory that a plan leaves for a step."""
    most = subject.backend.max_drafts(subject.options)
    if type(most) is not int or most < 0:
        raise WrongError(f"max_drafts must return a whole number from 0 on, not {most!r:.60}")
    rehearsal = Rehearsal(subject)
    longest = 0
    for number in range(6):
        sequence = rehearsal.lend(number, repeating(number, 3 + number, 60), max_new_tokens=5000)
        for _ in range(30):
            drafts = rehearsal.propose([sequence], [1000])[0]
            longest = max(longest, len(drafts))
            grow(sequence, truth(sequence, len(drafts) + 1))
    if longest > most:
        raise WrongError(
            f"proposes {longest} drafts to a request that asks for no number, and max_drafts says "
            f"{most}: memory of a step is planned for those"
        )
    return f"at most {longest} drafts"


def _release(subject: Subject, rows: int) -> None:
    """What is released can be collected."""
    rehearsal = Rehearsal(subject)
    with quick_collection():
        sequences = [rehearsal.lend(n, repeating(n, 3, 20)) for n in range(rows)]
        rehearsal.traffic(sequences, 5, subject.random("release"))
        rehearsal.release(sequences)
        kept = [weakref.ref(s) for s in sequences]
        del sequences
        gc.collect()
    if any(reference() is not None for reference in kept):
        raise WrongError("keeps a sequence after release, with all of its tokens")


def _release_unknown(subject: Subject, _: object) -> None:
    """A request may end before it was drafted for, and be told of twice."""
    rehearsal = Rehearsal(subject)
    stranger, known = rehearsal.lend(7, [5, 6, 7]), rehearsal.lend(8, repeating(1, 3, 20))
    rehearsal.release([])
    rehearsal.release([stranger])
    rehearsal.propose([known], [4])
    rehearsal.release([known, rehearsal.lend(9, [5])])
    rehearsal.release([known])


def _release_some(subject: Subject, _: object) -> None:
    """Those that go on are not forgotten with those that end."""
    numbers = subject.random("release some")
    rehearsal = Rehearsal(subject)
    sequences = [rehearsal.lend(n, repeating(n, 3, 20)) for n in range(6)]
    rehearsal.traffic(sequences, 6, numbers)
    rehearsal.release(sequences[::2])
    rehearsal.traffic(sequences[1::2], 6, numbers)


def _forgets(subject: Subject, _: object) -> str:
    """The same texts again and again, under other numbers: memory must not grow with them."""
    rehearsal = Rehearsal(subject)
    numbers = iter(range(10, 1_000_000))

    def requests() -> None:
        for _ in range(30):
            sequence = rehearsal.lend(next(numbers), repeating(1, 4, 24))
            for _ in range(3):
                rehearsal.propose([sequence], [4])
                grow(sequence, truth(sequence, 1))
            rehearsal.release([sequence])

    each = growth(requests, 40 * 30) / 30
    if each > 40:
        raise WrongError(f"keeps {each:.0f} bytes of each request after release: memory grows")
    return f"{max(0.0, each):.0f} bytes a request stay"


def _two_engines(subject: Subject, _: object) -> None:
    """Two engines have requests of the same numbers: what is kept must not be shared."""

    def texts(rehearsal: Rehearsal, shift: int) -> list[Any]:
        return [rehearsal.lend(n, repeating(n + shift, 3 + n, 30)) for n in range(3)]

    def step(rehearsal: Rehearsal, sequences: list[Any]) -> list[list[int]]:
        found = rehearsal.propose(sequences, [5] * 3)
        for sequence in sequences:
            grow(sequence, truth(sequence, 2))
        return found

    lonely = Rehearsal(subject)
    own = texts(lonely, 0)
    expected = [step(lonely, own) for _ in range(4)]
    lonely.release(own)
    one, other = Rehearsal(subject), Rehearsal(subject)
    strangers, own = texts(other, 3), texts(one, 0)
    for drafts in expected:
        step(other, strangers)
        if (found := step(one, own)) != drafts:
            raise WrongError(
                "another engine's requests of the same numbers change the drafts: "
                f"{found[0]} instead of {drafts[0]}; keep what is kept in the bound strategy"
            )


def _rate(subject: Subject, _: object) -> None:
    strategy = Rehearsal(subject).strategy
    rate, speedup = strategy.min_acceptance_rate, strategy.min_speedup
    if type(rate) not in (int, float) or not 0 <= rate <= 1:
        raise WrongError(f"min_acceptance_rate must be a share from 0 to 1, not {rate!r:.60}")
    if type(speedup) not in (int, float) or not 0 <= speedup < math.inf:
        raise WrongError(f"min_speedup must be a number of 0 or more, not {speedup!r:.60}")


def _time(subject: Subject, _: object) -> str:
    """A long text that grows: a call must not take as long as a step."""
    rehearsal = Rehearsal(subject)
    text = subject.random("time").choices(range(VOCAB), k=LONG)
    sequence = rehearsal.lend(1, text, max_new_tokens=LONG)
    took = []
    for _ in range(4):
        begin = time.thread_time()
        rehearsal.propose([sequence], [8])
        took.append(time.thread_time() - begin)
        grow(sequence, [5])
    if min(took[1:]) > SLOW:
        raise WrongError(
            f"a call takes {min(took[1:]):.1f} s where a text has {LONG} tokens; index the text as "
            "it grows"
        )
    return f"{1000 * min(took[1:]):.2g} ms a call where a text has {LONG} tokens"
