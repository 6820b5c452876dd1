"""What storms have in common: an engine that is stepped by hand, and left with nothing open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from driven import recorded
from hypothesis.stateful import RuleBasedStateMachine

from jackfield import Engine
from jackfield.contracts import Step
from jackfield.registry.backends import Registered


@contextlib.contextmanager
def held_closely() -> Iterator[None]:
    """What is loaded within is looked at as if all of it were a stranger's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registered, "own", False)
        yield


class Stepped(RuleBasedStateMachine):
    """An engine whose steps are taken here; `open` has what was submitted and has not ended."""

    def drive(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = engine._loop
        self.loop.clock = lambda: float(self.loop.steps)  # schedulers are told the same again
        self.patch = pytest.MonkeyPatch()
        self.steps: list[Step] = recorded(self.loop.cache, self.patch)
        self.open: dict[int, Any] = {}

    def step(self, count: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        for _ in range(3000):
            if not (self.loop.running or self.loop.waiting):
                break
            self.step(1)
        assert not self.open, "somebody waits for ever"

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.finish()
            finally:
                self.patch.undo()
                self.engine.close()
