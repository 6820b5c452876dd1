"""A request that gets no turn for ever ends by an error that names who passed it over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jackfield
from jackfield.contracts import BindContext, Scheduler, Sequence
from jackfield.engine import checked_schedule
from jackfield.engine.engine import Engine
from jackfield.errors import ExecutionError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.scheduler.fifo import FifoSchedule

NEW = 4
Serving = Callable[..., Engine]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """An engine with a scheduler of a stranger; 4 steps without a token are for ever."""
    monkeypatch.setattr(checked_schedule, "FOR_EVER", 3)
    made: list[Engine] = []

    def serve(schedule: FifoSchedule, **arguments: Any) -> Engine:
        class Odd(Scheduler):
            name = "odd"

            def bind(self, context: BindContext) -> FifoSchedule:
                return schedule

        mine = Registered(Odd(), "stranger", "1.2", "ep")
        known = registry().backends["scheduler"]
        monkeypatch.setitem(registry().backends, "scheduler", [*known, mine])
        made.append(jackfield.load("demo", scheduler="odd", **arguments))
        return made[-1]

    yield serve
    for engine in made:
        engine.close()


def request(engine: Engine, **settings: Any) -> Sequence:
    return engine._intake.sequence(
        [5, 6, 7], {"max_new_tokens": NEW, "min_new_tokens": NEW, **settings}, streams=False
    )


def flood(engine: Engine, victim: Sequence, steps: int = 60, **settings: Any) -> list[Sequence]:
    """One more request before every few steps, taken by hand; returns those."""
    engine._loop.submit(victim)
    later = []
    for step in range(steps):
        if step % 2 == 0:
            later.append(request(engine, **settings))
            engine._loop.submit(later[-1])
        engine._loop.step()
    return later


class OneOnly(FifoSchedule):
    """Feeds the newest of those that run."""

    def schedule(self, running: Any, pending: Any, budget: int, now: float) -> list[int]:
        newest = max(s.id for s in running)
        return [int(s.id == newest) * n for s, n in zip(running, pending, strict=True)]


def test_who_runs_and_gets_no_turn_is_ended(serving: Serving) -> None:
    engine = serving(OneOnly(1e-9), cache_implementation="paged")
    victim = request(engine)
    flood(engine, victim, steps=30)
    assert victim.finish_reason == "error"
    assert victim.error is not None
    assert "'odd' of stranger 1.2 passed it over 4" in victim.error


def test_a_request_that_the_loop_forgets_ends_by_an_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving(FifoSchedule(10))

    def forget() -> list[Any]:
        engine._loop.waiting.clear()
        return []

    monkeypatch.setattr(engine._loop, "step", forget)
    with pytest.raises(ExecutionError, match="never ended this request"):
        engine.generate([5, 6, 7], max_new_tokens=NEW)
