"""A cache that is driven as the loop drives it, by somebody who knows what it must hold."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from jackfield.contracts import KVCache, PackedKVCache, ScheduledSequence, Sequence, Settings, Step
from jackfield.testing.cache.judging import Judge, Text
from jackfield.testing.cache.reading import packed_step, padded_step
from jackfield.testing.cache.states import States
from jackfield.testing.checks import WrongError
from jackfield.testing.models import VOCAB

#: New tokens of a request: how many columns a cache of fixed shape has to have.
MOST = 64


class Driver:
    """Feeds sequences to a cache, and compares all that it hands out with what it was given.

    Attributes:
        cache: Held to its contract.
        running: The sequences that it holds, in the order of the loop.
        aside: Those that were preempted and wait.
        done: What was done, in words.
        where: Where each layer's keys lay in the last padded step.
        inputs: Those of the last step.
        takes_back: Whether the job has drafts that may be wrong.
        copies: Whether it has sequences that go on as copies.
    """

    def __init__(self, cache: KVCache, requirements: Any, rounding: float) -> None:
        self.cache = cache
        self.windows, self.types = requirements.windows, requirements.layer_types
        states = States(
            requirements.packed_shapes, getattr(torch, requirements.dtype), requirements.device
        )
        self.judge = Judge(states, rounding)
        self.running: list[Sequence] = []
        self.aside: list[Sequence] = []
        self.done: list[str] = []
        self.where: list[tuple[int, ...]] = []
        self.inputs: Any = None
        self.takes_back, self.copies = requirements.rollback, requirements.forks
        self._made = 0

    def tokens(self, count: int) -> list[int]:
        """`count` tokens that nobody had."""
        step = 7 * (self._made + 1)
        return [(step + 11 * i + i * i) % VOCAB for i in range(count)]

    def admit(self, tokens: Seq[int] | int, *, salt: str = "", most: int = MOST) -> Sequence | None:
        """Have a new sequence enter. None: it is full, or its rows run already."""
        given = self.tokens(tokens) if isinstance(tokens, int) else list(tokens)
        sequence = Sequence(self._made, given, Settings(max_new_tokens=most, cache_salt=salt))
        self._made += 1
        self.judge.texts[sequence.id] = Text(sequence.id)
        return sequence if self._enter(sequence) else None

    def _enter(self, sequence: Sequence) -> bool:
        self.done.append(f"admit {len(sequence.tokens)} tokens")
        if not self.cache.admit(sequence):
            if not self.running:
                raise WrongError("admit says no although nothing runs in it")
            self.done[-1] += " (no)"
            return False
        self.running.append(sequence)
        return True

    def step(
        self,
        wanted: Mapping[int, int] | None = None,
        drafts: Mapping[int, int] | None = None,
        kept: Mapping[int, int] | None = None,
    ) -> Step:
        """Feed the running sequences what they lack, or as many tokens as `wanted` says by id.

        `drafts`: how many each gets; `kept`: how many of these turn out right. Each that reaches
        its end gets one token more.
        """
        step = self._fitting(wanted or {}, drafts or {})
        told = ", ".join(
            f"{item.num_tokens}" + (f"+{len(item.drafts)} drafts" if item.drafts else "")
            for item in step.scheduled
        )
        self.done.append(f"feed {told}")
        self.run(step)
        self._commit(step, kept or {})
        return step

    def run(self, step: Step, layers: int | None = None) -> None:
        """Lay a step out and run it, in the first `layers` layers only where that is given."""
        self.inputs = self.cache.prepare(step)
        items = [(item, self._text(item)) for item in step.scheduled]
        if isinstance(self.cache, PackedKVCache):
            which = range(len(self.windows))[:layers]
            fixed = self.inputs.fixed
            rows = 0 if fixed is None else fixed.rows
            packed_step(self.cache, items, self.judge, self.windows, which, rows)
        else:
            kinds, windows = self.types[:layers], self.windows[:layers]
            self.where = padded_step(self.inputs, items, self.judge, kinds, windows)

    def _text(self, item: ScheduledSequence) -> Text:
        """What the cache is to hold of a sequence, with the tokens of the step."""
        sequence = item.sequence
        own = self.judge.texts[sequence.id]
        tokens = [*sequence.tokens[: item.start + item.num_tokens], *item.drafts]
        own.chain = self.judge.states.chain(tokens, sequence.settings.cache_salt)
        return own

    def _fitting(self, wanted: Mapping[int, int], drafts: Mapping[int, int]) -> Step:
        """As in the loop: without drafts where they do not fit, then with a sequence less."""
        while True:
            step = self._schedule(wanted, drafts)
            if self.cache.fits(step):
                return step
            if drafts:
                drafts = {}
            elif len(self.running) == 1:
                raise WrongError(
                    f"fits says no to {len(self.running[0].tokens)} tokens of the only request"
                )
            else:
                self.preempt(max(self.running, key=lambda sequence: sequence.id))

    def _schedule(self, wanted: Mapping[int, int], drafts: Mapping[int, int]) -> Step:
        left = [len(s.tokens) - s.num_cached for s in self.running]
        asked = [min(n, wanted.get(s.id, n)) for s, n in zip(self.running, left, strict=True)]
        counts = self.cache.adjust_schedule(tuple(self.running), asked)
        items = []
        for sequence, count in zip(self.running, counts, strict=True):
            if count or not self.cache.continuous:
                item = ScheduledSequence(sequence, sequence.num_cached, count)
                if item.samples and (number := self._room(sequence, drafts)):
                    guesses = [(3 * sequence.tokens[-1] + 5 * i + 1) % VOCAB for i in range(number)]
                    item = ScheduledSequence(sequence, sequence.num_cached, count, guesses)
                items.append(item)
        return Step(items)

    def _room(self, sequence: Sequence, drafts: Mapping[int, int]) -> int:
        left = sequence.settings.max_new_tokens - sequence.num_new - 1
        return max(0, min(drafts.get(sequence.id, 0), left))

    def _commit(self, step: Step, kept: Mapping[int, int]) -> None:
        right = [min(len(i.drafts), kept.get(i.sequence.id, 0)) for i in step.scheduled]
        counts = [i.num_tokens + n for i, n in zip(step.scheduled, right, strict=True)]
        self.cache.commit(step, counts)
        for item, number in zip(step.scheduled, right, strict=True):
            sequence, text = item.sequence, self.judge.texts[item.sequence.id]
            end = item.start + item.num_tokens + number
            self.judge.rejected.update(text.chain[end:])
            del text.chain[end:]
            if sequence.num_cached != end:
                raise WrongError(f"commit leaves num_cached at {sequence.num_cached}, not {end}")
            if item.samples:
                for token in (*item.drafts[:number], self._next(sequence)):
                    list.append(sequence.tokens, token)

    def _next(self, sequence: Sequence) -> int:
        return (5 * sequence.tokens[-1] + 3 * len(sequence.tokens) + sequence.id + 1) % VOCAB

    def release(self, *sequences: Sequence) -> None:
        self.done.append(f"release {_named(sequences)}")
        self.cache.release(list(sequences))
        gone = {id(sequence) for sequence in sequences}
        self.running = [s for s in self.running if id(s) not in gone]
        self.aside = [s for s in self.aside if id(s) not in gone]

    def release_all(self) -> None:
        self.release(*self.running, *self.aside)

    def check_empty(self) -> None:
        """Raise WrongError where memory is held though all have left."""
        held, usage = self.cache.held_bytes(), self.cache.usage()
        if held:
            raise WrongError(f"holds {held} bytes, and nobody runs")
        if usage is not None and (usage.pages_used or usage.swapped):
            raise WrongError(
                f"{usage.pages_used} pages are used and {usage.swapped} sequences swapped out, and "
                "nobody is there"
            )

    def preempt(self, sequence: Sequence) -> None:
        self.done.append(f"preempt {_named([sequence])}")
        self.cache.preempt(sequence)
        self.running.remove(sequence)
        self.aside.append(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Admit one again that was preempted."""
        if entered := self._enter(sequence):
            self.aside.remove(sequence)
        return entered

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """As of a draft model: another text goes on behind the first `tokens` cached ones."""
        self.done.append(f"truncate {_named([sequence])} to {tokens}")
        self.cache.truncate(sequence, tokens)
        self.judge.rejected.update(self.judge.texts[sequence.id].chain[tokens:])
        list.__delitem__(sequence.tokens, slice(max(1, tokens), None))
        list.append(sequence.tokens, self._next(sequence))
        if not sequence.num_cached and self.cache.continuous:  # it forgot all
            self.running.remove(sequence)
            self._enter(sequence)

    def fork(self, sources: Seq[Sequence], dropped: Seq[Sequence] = ()) -> list[Sequence]:
        """A copy of each of `sources`, whose last token, which is not cached, is another one."""
        copies: list[tuple[Sequence, Sequence]] = []
        for source in sources:
            last = (source.tokens[-1] + 1 + len(copies)) % VOCAB
            into = Sequence(self._made, [*source.tokens[:-1], last], source.settings)
            into.prompt_length = source.prompt_length
            self._made += 1
            copies.append((source, into))
            self.judge.texts[into.id] = Text(into.id, list(self.judge.texts[source.id].chain))
        pairs = ", ".join(f"{source.id} to {into.id}" for source, into in copies)
        self.done.append(f"fork {pairs}" + (f", drop {_named(dropped)}" if dropped else ""))
        self.cache.fork(copies, list(dropped))
        gone = {id(sequence) for sequence in dropped}
        self.running = [s for s in self.running if id(s) not in gone]
        self.running += [into for _, into in copies]
        return [into for _, into in copies]


def _named(sequences: Seq[Sequence]) -> str:
    return "request " + " and ".join(str(sequence.id) for sequence in sequences)
