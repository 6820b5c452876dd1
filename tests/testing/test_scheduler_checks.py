"""The checks of schedulers: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler import BY_HAND, ZOO, Right, of
from wrong import Wrong, caught, is_named, judged

from jackfield.contracts import Scheduler
from jackfield.testing.checks import Verdict, failures
from jackfield_plugins.scheduler.fifo import Fifo
from jackfield_plugins.scheduler.short_first import ShortFirst

SAMPLE = (
    "priorities upside down", "length before priority", "no deadline as NaN",
    "patience without an end", "one more than the budget", "keeps who it has seen",
    "the newest prompt first", "writes into requests",
)  # fmt: skip


class Least(Right):
    """The least that is right: one whole prompt or everybody's next token."""

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        first = next((i for i, n in enumerate(uncached) if n > 1), None)
        if first is None:
            return [1] * len(uncached)
        return [min(n, budget) if i == first else 0 for i, n in enumerate(uncached)]


def told(found: list[Verdict]) -> list[tuple[str, str]]:
    return [(one.name, one.message) for one in failures(found)]


@pytest.mark.parametrize("backend", [Fifo, of(Right)], ids=["fifo", "plain"])
def test_a_right_scheduler_passes(backend: Any) -> None:
    assert told(judged(backend)) == []


@pytest.mark.long
@pytest.mark.parametrize("backend", [ShortFirst, of(Least)], ids=["short-first", "least"])
def test_other_right_schedulers_pass(backend: Any) -> None:
    assert told(judged(backend)) == []


def assert_caught(wrong: Wrong) -> None:
    found = caught(wrong)
    assert found is not None, f"{wrong} was not caught"
    assert is_named(wrong, found), found


@pytest.mark.parametrize("wrong", [w for w in BY_HAND if w.name in SAMPLE], ids=str)
def test_a_wrong_scheduler_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


def test_the_sample_and_the_names_are_what_they_seem() -> None:
    names = [wrong.name for wrong in ZOO]
    assert len(set(names)) == len(names)
    assert set(SAMPLE) <= set(names)
    assert all(isinstance(wrong.backend(), Scheduler) for wrong in ZOO)
