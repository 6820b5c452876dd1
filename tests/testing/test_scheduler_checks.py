"""The checks of schedulers: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler import ZOO, Right, of
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield.contracts import Scheduler
from jackfield_plugins.scheduler.fifo import Fifo
from jackfield_plugins.scheduler.short_first import ShortFirst

SAMPLE = (
    "priorities upside down", "length before priority", "no deadline as NaN",
    "patience without an end", "one more than the budget", "keeps who it has seen",
    "keeps a record of each in blocks",
    "the newest prompt first", "writes into requests",
)  # fmt: skip


class Least(Right):
    """The least that is right: one whole prompt or everybody's next token, in turns."""

    read_one = False

    def schedule(self, running: Any, uncached: Any, budget: int, now: float) -> Any:
        first = next((i for i, n in enumerate(uncached) if n > 1), None)
        decode = [int(n == 1) for n in uncached]
        if first is None or (self.read_one and any(decode)):
            self.read_one = False
            return decode
        self.read_one = True
        return [min(n, budget) if i == first else 0 for i, n in enumerate(uncached)]


@pytest.mark.parametrize("backend", [Fifo, of(Right)], ids=["fifo", "plain"])
def test_a_right_scheduler_passes(backend: Any) -> None:
    assert_right(judged(backend))


@pytest.mark.long
@pytest.mark.parametrize("backend", [ShortFirst, of(Least)], ids=["short-first", "least"])
def test_other_right_schedulers_pass(backend: Any) -> None:
    assert_right(judged(backend))


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
def test_a_wrong_scheduler_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


def test_the_zoo_is_of_schedulers() -> None:
    assert all(isinstance(wrong.backend(), Scheduler) for wrong in ZOO)
