"""The state machine itself; imports hypothesis."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from jackfield.testing.cache.bench import Bench
from jackfield.testing.cache.driver import Driver

LENGTHS = st.sampled_from((1, 2, 3, 4, 5, 7, 9, 12, 17, 21, 33, 38))
ROWS = 5


class Machine(RuleBasedStateMachine):
    """Sequences come, feed, guess, part, give up their memory, come back and leave."""

    bench: Bench
    name: str
    needs: dict[str, Any]
    last: Driver | None = None
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self._open = contextlib.ExitStack()
        self.driver = self._open.enter_context(self.bench.drive(self.name, **self.needs))
        type(self).last = self.driver
        self._stepped = False  # rows run, so that nobody can enter where they go together
        self._known: list[list[int]] = []  # prompts of before

    @property
    def continuous(self) -> bool:
        return self.driver.cache.continuous

    @property
    def running(self) -> list[Any]:
        return self.driver.running

    @precondition(lambda self: len(self.running) < ROWS and (self.continuous or not self._stepped))
    @rule(length=LENGTHS, like=st.none() | st.integers(0, 9), salt=st.sampled_from(("", "", "a")))
    def enter(self, length: int, like: int | None, salt: str) -> None:
        """`like`: its prompt begins as one before it did."""
        tokens = self.driver.tokens(length)
        if like is not None and self._known:
            tokens = [*self._known[like % len(self._known)][:length], *tokens[length // 2 :]]
        self._known.append(tokens)
        if self.driver.admit(tokens, salt=salt):
            type(self).count += 1

    @precondition(lambda self: self.running)
    @rule(wanted=st.lists(st.sampled_from((None, 0, 1, 2, 3, 5, 16)), min_size=1, max_size=ROWS))
    def feed(self, wanted: list[int | None]) -> None:
        """Some or all of what each lacks."""
        if not self._room():
            return
        asked = {}
        for number, sequence in enumerate(self.running):
            want = wanted[number % len(wanted)]
            if want is not None and (want or self.continuous):
                asked[sequence.id] = want
        if len(asked) == len(self.running) and not any(asked.values()):
            asked[self.running[0].id] = 1
        self._stepped = True
        self.driver.step(asked)

    @precondition(lambda self: self.running and self.driver.takes_back)
    @rule(drafts=st.lists(st.integers(0, 4), min_size=1, max_size=ROWS), kept=st.integers(0, 4))
    def guess(self, drafts: list[int], kept: int) -> None:
        if not self._room():
            return
        self._stepped = True
        ids = [sequence.id for sequence in self.running]
        made = {number: drafts[at % len(drafts)] for at, number in enumerate(ids)}
        right = {number: (kept + at) % (made[number] + 1) for at, number in enumerate(ids)}
        self.driver.step(drafts=made, kept=right)

    def _room(self) -> bool:
        """Whether nobody has all of its new tokens."""
        full = [s for s in self.running if s.num_new >= s.settings.max_new_tokens - 1]
        if full:
            self.driver.release(*full)
            self._stepped &= bool(self.running)
        return bool(self.running)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS))
    def leave(self, which: int) -> None:
        self.driver.release(self.running[which % len(self.running)])
        self._stepped &= bool(self.running)

    @precondition(lambda self: self.running and self.continuous)
    @rule(which=st.integers(0, ROWS))
    def preempt(self, which: int) -> None:
        self.driver.preempt(self.running[which % len(self.running)])

    @precondition(lambda self: self.driver.aside and len(self.running) < ROWS)
    @rule(which=st.integers(0, ROWS))
    def come_back(self, which: int) -> None:
        self.driver.resume(self.driver.aside[which % len(self.driver.aside)])

    @precondition(lambda self: self.driver.copies and self.ready and len(self.running) < ROWS)
    @rule(which=st.integers(0, ROWS), times=st.integers(1, 2), drop=st.booleans())
    def fork(self, which: int, times: int, drop: bool) -> None:
        ready = self.ready
        source = ready[which % len(ready)]
        others = [s for s in self.running if s is not source]
        self.driver.fork([source] * times, dropped=others[:1] if drop else [])

    @precondition(lambda self: self.driver.takes_back and self.ready)
    @rule(which=st.integers(0, ROWS), back=st.integers(1, 6))
    def truncate(self, which: int, back: int) -> None:
        ready = self.ready
        sequence = ready[which % len(ready)]
        if self.continuous or len(sequence.tokens) - back > 1:
            self.driver.truncate(sequence, max(0, sequence.num_cached - back))

    @property
    def ready(self) -> list[Any]:
        """Those whose last token alone is not cached."""
        return [s for s in self.running if len(s.tokens) - s.num_cached == 1 and s.num_new]

    @precondition(lambda self: not self.running and not self.driver.aside)
    @rule()
    def forget(self) -> None:
        self.driver.done.append("forget")
        self.driver.cache.forget()

    def teardown(self) -> None:
        with self._open:
            if sys.exc_info()[0] is not None:  # which is what went wrong
                return
            self.driver.release_all()
            self.driver.check_empty()


def machine_of(bench: Bench, name: str, needs: dict[str, Any]) -> type[Machine]:
    """A class of its own for a model."""
    members = {"bench": bench, "name": name, "needs": needs, "last": None, "count": 0}
    return type("CacheMachine", (Machine,), members)
