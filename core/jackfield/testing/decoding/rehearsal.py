"""Calls of a strategy that drafts, as an engine makes them, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from itertools import islice
from typing import Any

from jackfield.contracts import Sequence
from jackfield.testing.checks import WrongError
from jackfield.testing.decoding.bound import Assisting, bind
from jackfield.testing.lent import Lent, Watch, grow, lend
from jackfield.testing.models import VOCAB
from jackfield.testing.subject import Subject


def repeating(number: int, period: int, length: int) -> list[int]:
    """A text that repeats `period` tokens, which no other `number` below 8 has."""
    first = (number % 8) * 12
    return [first + i % period for i in range(length)]


def truth(sequence: Sequence, count: int) -> list[int]:
    """How such a text goes on."""
    tokens = sequence.tokens
    period = next((p for p in range(1, 13) if tokens[p:] == tokens[:-p]), 1)
    return [tokens[(len(tokens) + i) % period] for i in range(count)]


class Rehearsal:
    """A strategy of `subject` and what it is lent. Each call is held to the contract."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        own = subject.backend.capabilities
        helped = own.assistant or own.heads
        self.assistant = Assisting(truth) if helped else None
        self.strategy = bind(subject, self.assistant)
        self.known: list[Lent] = []
        self.calls = self.drafted = 0

    def lend(self, number: int, prompt: Seq[int], **settings: Any) -> Lent:
        """A sequence that decodes from now on: all but its last token is cached."""
        name = self.subject.registered.name
        sequence = lend(number, prompt, num_cached=len(prompt) - 1, decoding=name, **settings)
        self.known.append(sequence)
        return sequence

    def propose(
        self, sequences: Seq[Sequence], rooms: Seq[int], *, lists: bool = False
    ) -> list[list[int]]:
        """What it proposes. `lists`: what it is lent are lists, which it could change."""
        rows: Any = list(sequences) if lists else tuple(sequences)
        most: Any = list(rooms) if lists else tuple(rooms)
        watch = Watch(self.known)
        helper = self.assistant
        with nullcontext() if helper is None else helper.proposing(rows, rooms):
            said = self.strategy.propose(rows, most)
            found = _read(said, rooms)
        watch.check("propose")
        if list(rows) != list(sequences):
            raise WrongError("propose changed the list of sequences that it was handed")
        if list(most) != list(rooms):
            raise WrongError("propose changed the list of numbers that it was handed")
        self.calls += 1
        self.drafted += sum(map(len, found))
        return found

    def release(self, sequences: Seq[Sequence]) -> None:
        """These end: nothing of theirs may be kept."""
        watch = Watch(self.known)
        self.strategy.release(tuple(sequences))
        watch.check("release")
        gone = {id(s) for s in sequences}
        self.known = [s for s in self.known if id(s) not in gone]
        if self.assistant is not None and (left := self.assistant.held & {s.id for s in sequences}):
            raise WrongError(
                f"release of request {min(left)} does not release it in the draft model, whose "
                "cache keeps it: call Assistant.release"
            )

    def traffic(self, sequences: Seq[Lent], steps: int, numbers: random.Random) -> None:
        """Sequences decode for some steps: some rest, some begin anew."""
        for _ in range(steps):
            rows = [s for s in sequences if numbers.random() < 0.8] or list(sequences[:1])
            rooms = [numbers.choice((1, 2, 3, 7, 100)) for _ in rows]
            for sequence, drafts in zip(rows, self.propose(rows, rooms), strict=True):
                right = truth(sequence, len(drafts) + 1)
                same = next(
                    (i for i, (d, r) in enumerate(zip(drafts, right, strict=False)) if d != r),
                    len(drafts),
                )
                grow(sequence, right[: same + 1])
            for resting in sequences:  # it goes on without drafts for a while
                if resting not in rows and numbers.random() < 0.5:
                    grow(resting, truth(resting, numbers.choice((1, 7))))
            if numbers.random() < 0.1:  # its memory is taken, and its text is read again
                rows[0].preemptions += 1


def _read(said: Any, rooms: Seq[int]) -> list[list[int]]:
    """Drafts as plain lists, held to the contract."""
    try:
        rows = len(said)
    except TypeError:
        raise WrongError(f"propose must return a list of lists, not {said!r:.60}") from None
    if rows != len(rooms):
        raise WrongError(
            f"propose was asked about {len(rooms)} sequences, and returned {rows} lists of drafts"
        )
    found = []
    for drafts, room in zip(said, rooms, strict=True):
        try:
            own = list(islice(drafts, room + 1))
        except TypeError:
            what = f"the drafts of a sequence must be a list, not {drafts!r:.60}"
            raise WrongError(what) from None
        if len(own) > room:
            raise WrongError(f"propose returned more drafts than the {room} that there is room for")
        for token in own:
            if type(token) is not int or not 0 <= token < VOCAB:
                raise WrongError(f"a draft is {token!r:.40}, and no token id from 0 to {VOCAB - 1}")
        found.append(own)
    return found
