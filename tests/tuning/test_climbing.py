"""The climb against made-up machines: what is fastest is found, and nothing slower than auto."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jackfield.errors import ExecutionError, UsageError
from jackfield.tuning.bounds import Bounds, Budget, parse_seconds
from jackfield.tuning.candidates import RUNGS, Candidate, Dropped, Quality, Rung
from jackfield.tuning.climbing import Climb, Outcome, Tried

#: rung -> what can be chosen, the first one being what auto chooses.
CHOICES = {
    "precision": ("wide", "narrow"),
    "attention": ("plain", "flash", "slow"),
    "cache": ("pages", "rows"),
    "batch": ("all", "half", "one"),
}


@dataclass
class Machine:
    """Seconds are 1, times `factors` of what is chosen; everything takes time of a made-up clock.

    `noise` is the spread of a round, `broken` what fails, `wrong` what has other tokens, `quality`
    the perplexity of what changes it, `roofs` why something is pruned; `interrupt` is the round in
    which somebody presses Ctrl-C.
    """

    factors: Mapping[str, float]
    noise: float = 0.0
    loading: float = 5.0
    broken: Sequence[str] = ()
    wrong: Sequence[str] = ()
    quality: Mapping[str, float] = field(default_factory=dict)
    roofs: Mapping[str, str] = field(default_factory=dict)
    interrupt: int | None = None
    now: float = 0.0
    rounds: int = 0
    loaded: int = 0
    said: list[str] = field(default_factory=list)
    ran: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(7)

    def rung(self, name: str, best: Mapping[str, Any]) -> Rung:
        choices = CHOICES.get(name, ("this",))
        now = best.get(name, choices[0])
        others = [Candidate(name, c, {**best, name: c}) for c in choices if c != now]
        return Rung(now, others, [Dropped("nowhere", "needs a GPU")] if name == "cache" else [])

    def prune(
        self, candidate: Candidate, best: Mapping[str, Any], seconds: float, beside: int
    ) -> str | None:
        return self.roofs.get(candidate.label)

    def start(self, candidates: Sequence[Candidate]) -> Sequence[Run]:
        self.now += self.loading
        self.loaded += len(candidates)
        return [Run(self, one) for one in candidates]

    def seconds(self, arguments: Mapping[Any, Any]) -> float:
        exact = 1.0
        for value in arguments.values():
            exact *= self.factors.get(value, 1.0)
        return exact

    def climb(self, budget: float = 1000.0, bounds: Bounds | None = None) -> Outcome:
        made = Budget(budget, lambda: self.now)
        return Climb(self, self.start, bounds or Bounds(), made, self.said.append).run({})


@dataclass
class Run:
    machine: Machine
    candidate: Candidate

    @property
    def chosen(self) -> set[str]:
        return set(self.candidate.arguments.values())

    @property
    def error(self) -> str | None:
        return "it burnt down" if self.chosen & set(self.machine.broken) else None

    def round(self) -> float | None:
        one = self.machine
        one.rounds += 1
        if one.rounds == one.interrupt:
            raise KeyboardInterrupt
        if self.error:
            return None
        seconds = one.seconds(self.candidate.arguments)
        seconds *= one.chance.lognormvariate(0, one.noise)
        one.now += seconds
        one.ran[self.candidate.label] = one.ran.get(self.candidate.label, 0) + 1
        return seconds

    def flaws(self) -> Sequence[str]:
        return ("other tokens",) if self.chosen & set(self.machine.wrong) else ()

    def quality(self) -> Quality:
        worst = max((self.machine.quality.get(c, 10.0) for c in self.chosen), default=10.0)
        return Quality(worst, right=int(100 - worst), total=100)

    def peak_bytes(self) -> int | None:
        return 1_000_000

    def close(self) -> None:
        self.machine.loaded -= 1


def tried(outcome: Outcome, label: str) -> Tried:
    (found,) = [one for one in outcome.tried if one.label == label]
    return found


def machines() -> Iterator[dict[str, float]]:
    """Every order of what is fast, on each rung."""
    for values in itertools.product((0.7, 1.0, 1.4), repeat=4):
        yield dict(zip(("narrow", "flash", "rows", "half"), values, strict=True)) | {"slow": 3.0}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_it_finds_what_an_exhaustive_search_finds(noise: float) -> None:
    for factors in machines():
        machine = Machine(factors, noise)
        found = machine.climb()
        every = itertools.product(*CHOICES.values())
        fastest = min(machine.seconds(dict(enumerate(one))) for one in every)
        assert machine.seconds(found.arguments) == pytest.approx(fastest), factors
        assert found.finished
        assert machine.loaded == 0, "every process has ended"


def test_it_is_never_slower_than_auto_however_noisy() -> None:
    slower = 0
    for seed in range(60):
        factors = {"narrow": 1.1, "flash": 1.05, "slow": 1.2, "rows": 1.1, "half": 1.02}
        machine = Machine(factors, 0.3)
        machine.chance = random.Random(seed)
        slower += machine.seconds(machine.climb().arguments) > 1.0
    assert slower <= 60 * 0.05  # as often as the interval may be wrong


def test_who_falls_behind_has_few_rounds() -> None:
    machine = Machine({"slow": 5.0, "flash": 0.8})
    machine.climb()
    assert machine.ran["slow"] == 2
    assert machine.ran["flash"] >= 6


def test_each_step_is_a_sentence_with_its_figure() -> None:
    machine = Machine({"flash": 0.5, "rows": 1.3})
    found = machine.climb()
    said = "\n".join(machine.said)
    assert "auto: 1 s a round; loading took 5 s" in said
    assert "placement: stays this; there is nothing else here" in said
    assert "attention: flash takes 0.50 times as long as the best before (0.50 to 0.50" in said
    assert "cache: rows takes 1.30 times as long" in said
    assert "in the end: the best takes 0.50 times as long as auto" in said
    assert {line.split(":")[0] for line in machine.said} == {"auto", *RUNGS, "in the end"}
    assert tried(found, "nowhere").verdict == "refused: needs a GPU"
    assert tried(found, "flash").quality == Quality(10.0, 90, 100)
    assert found.change is not None
    assert found.change.ratio == pytest.approx(0.5)


def test_other_tokens_are_refused_and_the_next_fastest_is_taken() -> None:
    machine = Machine({"half": 0.5, "one": 0.7}, wrong=["half"])
    found = machine.climb()
    assert found.arguments == {"batch": "one"}
    assert tried(found, "half").verdict == "refused: other tokens"
    assert tried(found, "one").verdict == "taken"


@pytest.mark.parametrize(
    ("quality", "bounds", "kept", "why"),
    [
        (10.1, Bounds(), True, ""),
        (10.3, Bounds(), False, "perplexity rises by 3.0%, from 10 to 10.3; it may by 2.0%"),
        (10.3, Bounds(max_rise=0.05), True, ""),
        (14.0, Bounds(max_rise=1.0), False, "86 of 100 answers are right, and 90 were"),
        (14.0, Bounds(max_rise=1.0, max_drop=0.04), True, ""),
    ],
)
def test_what_loses_quality_beyond_the_bound_is_refused(
    quality: float, bounds: Bounds, kept: bool, why: str
) -> None:
    machine = Machine({"narrow": 0.5}, quality={"narrow": quality})
    found = machine.climb(bounds=bounds)
    assert (found.arguments == {"precision": "narrow"}) is kept
    assert why in tried(found, "narrow").verdict


def test_a_perplexity_that_is_no_number_is_beyond_every_bound() -> None:
    found = Bounds(max_rise=100.0).reason_against(Quality(10.0), Quality(float("nan")))
    assert found is not None


def test_what_fails_is_a_row_and_the_others_go_on() -> None:
    machine = Machine({"flash": 0.9, "rows": 0.5}, broken=["flash"])
    found = machine.climb()
    assert found.arguments == {"cache": "rows"}
    assert tried(found, "flash").verdict == "failed: it burnt down"


def test_auto_that_fails_is_an_error() -> None:
    class Burnt(Run):
        error = "it burnt down"  # type: ignore[assignment]

    class Burning(Machine):
        def start(self, candidates: Sequence[Candidate]) -> Sequence[Run]:
            self.loaded += len(candidates)
            return [Burnt(self, one) for one in candidates]

    machine = Burning({})
    with pytest.raises(ExecutionError, match="auto: it burnt down"):
        machine.climb()
    assert machine.loaded == 0


def test_what_a_bound_rules_out_is_not_measured() -> None:
    machine = Machine({}, roofs={"flash": "its roof is 2 s a round"})
    found = machine.climb()
    assert "flash" not in machine.ran
    assert tried(found, "flash").verdict == "not measured: its roof is 2 s a round"
    assert "attention: flash is not measured: its roof is 2 s a round" in machine.said


@pytest.mark.parametrize("budget", [30.0, 40.0, 60.0, 90.0, 200.0])
def test_the_budget_is_kept(budget: float) -> None:
    machine = Machine({"flash": 0.8, "rows": 0.9, "half": 0.9}, noise=0.05)
    machine.climb(budget)
    assert machine.now <= budget + 3.0  # a round more, of everybody


def test_a_budget_too_small_for_one_step_says_what_one_takes() -> None:
    machine = Machine({})
    with pytest.raises(UsageError, match=r"budget of 10 s is too small.*about \d+ s.*--budget"):
        machine.climb(10.0)
    assert machine.loaded == 0


def test_ctrl_c_keeps_the_best_so_far() -> None:
    whole = Machine({"flash": 0.5, "rows": 0.9})
    whole.climb()
    before = 0
    for at in range(2, whole.rounds + 1):
        machine = Machine({"flash": 0.5, "rows": 0.9}, interrupt=at)
        found = machine.climb()
        assert machine.loaded == 0
        assert machine.seconds(found.arguments) <= 1.0
        assert not found.finished
        before += bool(found.arguments)
    assert before > 5
    with pytest.raises(KeyboardInterrupt):
        Machine({}, interrupt=1).climb()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("1.5h", 5400), (" 3m ", 180)]
)
def test_budgets_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "0", "2 minutes", "inf", "nan", "1e3"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 90s, 2m or 1h"):
        parse_seconds(text)


@pytest.mark.parametrize("bound", [-0.1, float("nan")])
def test_what_is_no_bound_is_refused(bound: float) -> None:
    with pytest.raises(UsageError, match="--max-rise must be at least 0"):
        Bounds(max_rise=bound)
    with pytest.raises(UsageError, match="--max-drop must be at least 0"):
        Bounds(max_drop=bound)
