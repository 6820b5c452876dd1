"""Whatever a process is asked has an end that the budget sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from jackfield.benchmarking.workload import Request, Workload
from jackfield.errors import ExecutionError, UsageError
from jackfield.tuning.bounds import Budget
from jackfield.tuning.candidates import Candidate
from jackfield.tuning.processes import LEAST, PATIENCE, Processes, Question
from jackfield.tuning.tuning import imported

WORK = Workload("one", (Request((5, 6), 2),), 1)


@dataclass
class Clock:
    """Each question takes `steps[what]` seconds, as long as it may."""

    steps: dict[str, float]
    now: float = 0.0
    asked: list[tuple[str, float, float]] = field(default_factory=list)  # what, most, left

    def __post_init__(self) -> None:
        self.budget = Budget(100.0, lambda: self.now)


class Fake:
    """A worker by a made-up clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def ask(self, what: str, seconds: float, **given: Any) -> Any:
        clock = self.clock
        clock.asked.append((what, seconds, clock.budget.left()))
        takes = clock.steps.get(what, 0.0)
        clock.now += min(seconds, takes)
        if takes > seconds:
            raise ExecutionError("it did not end")
        return {
            "load": {},
            "round": {"seconds": takes, "tokens": [[1, 2]], "first": [None], "ended": [None]},
            "finish": {"peak_bytes": 1, "report": None},
            "quality": {"perplexity": 9.0, "right": 0, "total": 0},
            "judge": [{"worst": 0.0, "mean": 0.0, "rounding": 0.0}],
        }.get(what)

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock({})
    monkeypatch.setattr("jackfield.benchmarking.running.PAUSE", 0.0)
    monkeypatch.setattr("jackfield.benchmarking.running.begun", lambda nursery: Fake(made))
    monkeypatch.setattr("jackfield.benchmarking.judging.Worker", lambda *nursery: Fake(made))
    return made


def started(clock: Clock, rung: str, most: float = math.inf) -> Any:
    start = Processes({"model": "demo"}, WORK, Question([5, 6, 7]), clock.budget.left)
    (found,) = start([Candidate(rung, rung, {})], most, 1.0)
    return found


@pytest.mark.parametrize("rung", ["auto", "attention"])
def test_nothing_may_take_more_than_is_left(clock: Clock, rung: str) -> None:
    clock.steps = {"load": 10.0, "round": 5.0, "finish": 1.0, "quality": 3.0, "judge": 4.0}
    one = started(clock, rung)
    one.round()
    one.flaws()
    one.quality()
    one.peak_bytes()
    assert one.error is None
    whole = rung == "auto"
    assert {what for what, _, _ in clock.asked} >= {"load", "round", "quality", "judge", "finish"}
    for what, most, left in clock.asked:
        assert most <= left, what
    for what, most, left in clock.asked[:2]:  # to load, and the first round of a warm-up
        assert most == pytest.approx(left * (1 if whole else PATIENCE)), what


def test_judging_a_winner_ends_with_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is loaded once more, to see whether it rounds."""
    monkeypatch.setattr("jackfield.benchmarking.parity.reason_against", lambda *_, **how: "worse")
    clock.steps = {"load": 5.0, "round": 5.0, "judge": 20.0, "settled": 40.0}
    one = started(clock, "auto")
    (why,) = one.flaws()
    assert why == "its tokens could not be judged: it did not end"
    (judging,) = [at for at, (what, _, _) in enumerate(clock.asked) if what == "judge"]
    assert len(clock.asked) > judging + 1
    for what, most, left in clock.asked[judging:]:
        assert most <= max(left, 1.0), what


def test_a_warm_up_ends_with_its_share(clock: Clock) -> None:
    clock.steps = {"load": 1.0, "round": 20.0}
    one = started(clock, "attention")
    assert one.error == "it did not end"
    assert clock.now == pytest.approx(1.0 + PATIENCE * 99.0)
    clock.now, clock.steps = 0.0, {"load": 1.0, "round": 60.0}
    assert started(clock, "auto").error == "it did not end"
    assert clock.now == pytest.approx(100.0)


def test_the_last_race_runs_to_its_end_and_nothing_hangs(clock: Clock) -> None:
    clock.steps = {"load": 1.0, "round": 3.0}
    one = started(clock, "auto")
    clock.now = 200.0
    assert one.round() == 3.0
    clock.steps["round"] = 1e9
    assert one.round() is None
    assert clock.now == pytest.approx(203.0 + 3 * LEAST)
    other = started(clock, "auto")
    assert other.error == "it did not end"
    assert clock.now <= 235.0


def test_a_warm_up_ends_where_there_is_no_hope(clock: Clock) -> None:
    clock.steps = {"load": 1.0, "round": 3.0}
    assert started(clock, "attention", 2.9).behind == 3.0
    assert [what for what, _, _ in clock.asked] == ["load", "round", "round"]
    assert started(clock, "attention", 3.0).behind is None


def test_imports_that_take_the_budget_are_an_error() -> None:
    class Slow:
        def ready(self, seconds: float) -> None:
            assert seconds == pytest.approx(6.0)
            raise TimeoutError

    with pytest.raises(UsageError, match=r"budget of 6 s is too small.*not even the libraries"):
        imported(Slow(), Budget(6.0, lambda: 0.0))  # type: ignore[arg-type]
