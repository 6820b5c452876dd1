"""The climb against made-up machines: what is fastest is found, and nothing slower than auto."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jackfield.benchmarking.verdicts import Verdict
from jackfield.errors import ExecutionError, PlanError, UsageError
from jackfield.tuning.bounds import Bounds, Budget, parse_seconds
from jackfield.tuning.candidates import RUNGS, Candidate, Dropped, Quality, Rung
from jackfield.tuning.climbing import Climb
from jackfield.tuning.outcome import Outcome, Tried
from jackfield.tuning.racing import EARLY, FRESH

Candidates = Sequence[Candidate]

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
    the perplexity of what changes it, `roofs` why something is pruned; `dies` is after how many
    rounds a label fails. In whatever is asked as number `interrupt` somebody presses Ctrl-C. By the
    clock a round takes `waits` times what counts of it. A process is by chance, with a spread of
    `luck`, faster or slower than others of the same program.
    """

    factors: Mapping[str, float]
    noise: float = 0.0
    loading: float = 5.0
    broken: Sequence[str] = ()
    wrong: Sequence[str] = ()
    quality: Mapping[str, float] = field(default_factory=dict)
    roofs: Mapping[str, str] = field(default_factory=dict)
    dies: Mapping[str, int] = field(default_factory=dict)
    interrupt: int | None = None
    waits: float = 1.0
    luck: float = 0.0
    now: float = 0.0
    asked: int = 0
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

    def start(self, candidates: Candidates, most: float, least: float) -> Sequence[Run]:
        self.ask()
        self.now += self.loading
        self.loaded += len(candidates)
        luck = [self.chance.lognormvariate(0, self.luck) for _ in candidates]
        return [
            Run(self, one, self.behind(one, most), luck=by)
            for one, by in zip(candidates, luck, strict=True)
        ]

    def behind(self, candidate: Candidate, most: float) -> float | None:
        seconds = self.seconds(candidate.arguments)
        return seconds if seconds > most else None

    def ask(self) -> None:
        self.asked += 1
        if self.asked == self.interrupt:
            raise KeyboardInterrupt

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
    behind: float | None = None
    interrupted: bool = False
    dead: bool = False
    took: float = 0.0
    luck: float = 1.0

    @property
    def chosen(self) -> set[str]:
        return set(self.candidate.arguments.values())

    @property
    def error(self) -> str | None:
        if self.interrupted:
            return "its wire holds the answer to another question"
        burnt = self.dead or self.chosen & set(self.machine.broken)
        return "it burnt down" if burnt else None

    def ask(self) -> None:
        """As a process: what was interrupted answers nothing any more."""
        if self.interrupted:
            raise ExecutionError("its wire holds the answer to another question")
        try:
            self.machine.ask()
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def round(self) -> float | None:
        one, label = self.machine, self.candidate.label
        self.dead = self.dead or one.ran.get(label, 0) >= one.dies.get(label, 1 << 30)
        if self.error:
            return None
        self.ask()
        seconds = one.seconds(self.candidate.arguments)
        seconds *= one.chance.lognormvariate(0, one.noise) * self.luck
        one.now += seconds * one.waits
        one.ran[label] = one.ran.get(label, 0) + 1
        self.took = seconds * one.waits
        return seconds

    def flaws(self) -> Sequence[str]:
        self.ask()
        return ("other tokens",) if self.chosen & set(self.machine.wrong) else ()

    def quality(self) -> Quality:
        self.ask()
        worst = max((self.machine.quality.get(c, 10.0) for c in self.chosen), default=10.0)
        return Quality(worst, right=int(100 - worst), total=100)

    def peak_bytes(self) -> int | None:
        self.ask()
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
    machine = Machine({"slow": 2.0, "flash": 0.8, "rows": 1.2})
    found = machine.climb()
    assert machine.ran["slow"] == 2
    assert tried(found, "slow").verdict == "behind after 2 rounds"
    assert machine.ran["rows"] == 2 + EARLY
    assert tried(found, "rows").verdict == f"behind after {EARLY} rounds"
    assert machine.ran["flash"] >= 8


def test_who_is_far_behind_in_its_warm_up_is_not_raced() -> None:
    machine = Machine({"slow": 5.0, "flash": 0.8})
    found = machine.climb()
    assert "slow" not in machine.ran
    assert tried(found, "slow").verdict == "behind in its warm-up: 5 s a round"


def test_nobody_is_called_slower_who_is_undecided() -> None:
    said: set[str] = set()
    for seed in range(40):
        machine = Machine({"narrow": 1.005, "flash": 0.995, "rows": 1.001}, 0.02)
        machine.chance = random.Random(seed)
        for one in machine.climb().tried:
            said.add(one.verdict)
            if one.verdict == "slower":
                assert one.change is not None
                assert one.change.verdict is Verdict.SLOWER
    assert "not faster for certain" in said


def test_rungs_without_time_are_told() -> None:
    machine = Machine({"narrow": 0.5})
    found = machine.climb(90.0)
    assert found.arguments == {"precision": "narrow"}
    assert "batch" in found.unreached
    assert not {"placement", "precision"} & {*found.unreached}
    assert Machine({}).climb().unreached == ()


def test_without_time_no_rung_is_planned() -> None:
    class Slow(Machine):
        def rung(self, name: str, best: Mapping[str, Any]) -> Rung:
            self.now += 20.0
            return super().rung(name, best)

    machine = Slow({"narrow": 0.5})
    found = machine.climb(100.0)
    assert len(found.unreached) >= 3
    assert machine.now <= 100.0 + 20.0
    assert "batch: no time is left of 100 s" in machine.said


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
    assert found.change.rounds == FRESH


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
        def start(
            self, candidates: Sequence[Candidate], most: float, least: float
        ) -> Sequence[Run]:
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


@pytest.mark.parametrize("budget", [70.0, 80.0, 90.0, 120.0, 200.0])
def test_the_budget_is_kept(budget: float) -> None:
    machine = Machine({"flash": 0.8, "rows": 0.9, "half": 0.9}, noise=0.05)
    machine.climb(budget)
    assert machine.now <= budget + 3.0  # a round more, of everybody


@pytest.mark.parametrize("budget", [400.0, 600.0, 1200.0])
def test_the_budget_is_kept_where_requests_come_one_by_one(budget: float) -> None:
    machine = Machine({"flash": 0.8, "rows": 0.9, "half": 0.9}, noise=0.05, waits=8.0)
    machine.climb(budget)
    assert machine.now <= budget + 3 * 8.0


def test_a_budget_too_small_for_requests_that_come_one_by_one_is_told() -> None:
    with pytest.raises(UsageError, match=r"budget of 200 s is too small.*about \d+ s.*--budget"):
        Machine({"narrow": 0.5}, waits=8.0).climb(200.0)


def test_who_owes_it_to_its_process_alone_is_seldom_a_profile() -> None:
    """The last race has processes of its own, so that two have to be lucky."""
    taken = named = 0
    for seed in range(150):
        machine = Machine({}, 0.01, luck=0.01)
        machine.chance = random.Random(seed)
        found = machine.climb()
        named += bool(found.arguments)
        taken += any(one.verdict.startswith("taken") for one in found.tried)
    assert taken > 30
    assert named <= 0.4 * taken


def test_what_cannot_be_planned_any_more_is_passed_over() -> None:
    """Memory that others hold meanwhile, say."""

    class Held(Machine):
        def rung(self, name: str, best: Mapping[str, Any]) -> Rung:
            if name == "attention":
                raise PlanError("the weights do not fit")
            return super().rung(name, best)

        def prune(self, candidate: Candidate, *given: Any) -> str | None:
            if candidate.label == "rows":
                raise PlanError("no room")
            return super().prune(candidate, *given)

    machine = Held({"narrow": 0.5, "flash": 0.5, "rows": 0.5})
    found = machine.climb()
    assert (found.arguments, found.finished) == ({"precision": "narrow"}, True)
    assert tried(found, "rows").verdict == "not measured: it cannot be planned now: no room"
    assert found.unreached == ("attention",)
    assert any("cannot be planned now: the weights do not fit" in said for said in machine.said)


@pytest.mark.parametrize("at", range(2, 5))
def test_what_fails_on_the_way_leaves_the_best_so_far(at: int) -> None:
    class Full(Machine):
        starts = 0

        def start(self, candidates: Candidates, most: float, least: float) -> Sequence[Run]:
            self.starts += 1
            if self.starts == at:
                raise OSError("no more processes")
            return super().start(candidates, most, least)

    machine = Full({"narrow": 0.5, "rows": 0.5})
    found = machine.climb()
    assert (found.finished, found.interrupted) == (False, False)
    assert bool(found.arguments) is (at > 2)
    assert machine.loaded == 0
    assert any("stopped (no more processes)" in said for said in machine.said)


def test_what_was_refused_is_not_called_slower() -> None:
    machine = Machine({"flash": 0.5}, wrong=["flash"])
    machine.climb()
    assert machine.said[-1].startswith(
        "in the end: auto, since nothing else was faster for certain"
    )
    assert "and as good" in machine.said[-1]


@pytest.mark.parametrize("budget", [10.0, 30.0, 40.0, 55.0])
def test_a_budget_too_small_for_one_step_says_what_one_takes(budget: float) -> None:
    machine = Machine({"narrow": 0.5})
    says = rf"budget of {budget:g} s is too small.*about (\d+) s.*--budget"
    with pytest.raises(UsageError, match=says) as caught:
        machine.climb(budget)
    assert machine.loaded == 0
    (enough,) = re.findall(r"about (\d+) s", str(caught.value))
    assert Machine({"narrow": 0.5}).climb(float(enough) + 1.0).arguments == {"precision": "narrow"}


def test_a_budget_that_auto_uses_up_says_what_was_used() -> None:
    class Late(Machine):
        def start(
            self, candidates: Sequence[Candidate], most: float, least: float
        ) -> Sequence[Run]:
            self.now += 7.0
            return super().start(candidates, most, least)

    with pytest.raises(UsageError, match=r"budget of 9 s is too small.*takes more than 13 s here"):
        Late({}).climb(9.0)


def test_ctrl_c_keeps_the_best_so_far() -> None:
    whole = Machine({"flash": 0.5, "rows": 0.9})
    whole.climb()
    before = 0
    for at in range(3, whole.asked + 1):
        machine = Machine({"flash": 0.5, "rows": 0.9}, interrupt=at)
        found = machine.climb()
        assert machine.loaded == 0
        assert machine.seconds(found.arguments) <= 1.0
        assert found.interrupted
        assert not found.finished
        assert [one.verdict for one in found.tried].count("auto") == 1
        assert len({(one.rung, one.label) for one in found.tried}) == len(found.tried)
        assert {one.label for one in found.tried} >= {*machine.ran}
        before += bool(found.arguments)
    assert before > 5
    for at in (1, 2):  # while auto is loaded, and in its first round
        with pytest.raises(KeyboardInterrupt):
            Machine({}, interrupt=at).climb()


def last_race(factors: Mapping[str, float], label: str) -> int:
    """How many rounds of a label come before the last race."""
    machine = Machine(factors)
    machine.climb()
    return machine.ran[label] - FRESH


@pytest.mark.parametrize("rounds", range(FRESH))
def test_auto_that_dies_in_the_last_race_leaves_the_best_unfinished(rounds: int) -> None:
    factors = {"flash": 0.5}
    machine = Machine(factors, dies={"auto": last_race(factors, "auto") + rounds})
    found = machine.climb()
    assert found.arguments == {"attention": "flash"}
    assert (found.change, found.finished, found.interrupted) == (None, False, False)
    assert tried(found, "auto").verdict == "failed in the end: it burnt down"
    assert "in the end: auto failed: it burnt down; the best is the profile" in machine.said


@pytest.mark.parametrize("rounds", range(FRESH))
def test_a_best_that_dies_in_the_last_race_is_auto_s_profile(rounds: int) -> None:
    factors = {"flash": 0.5}
    machine = Machine(factors, dies={"flash": last_race(factors, "flash") + rounds})
    found = machine.climb()
    assert (found.arguments, found.change, found.finished) == ({}, None, True)
    why = "taken, then dropped: it failed in the end: it burnt down"
    assert tried(found, "flash").verdict == why
    assert "in the end: the best failed: it burnt down; the profile is auto's" in machine.said


def test_a_best_that_dies_on_a_rung_gives_its_place_to_auto() -> None:
    factors = {"narrow": 0.5, "rows": 0.8, "half": 1.1}
    whole = Machine(factors)
    whole.climb()
    assert whole.ran["narrow"] > 2 + FRESH
    for rounds in range(2 + FRESH, whole.ran["narrow"]):
        machine = Machine(factors, dies={"narrow": rounds})
        found = machine.climb()
        assert tried(found, "narrow").verdict == "taken, then dropped: it failed: it burnt down"
        assert "precision" not in found.arguments
        assert found.finished
        assert machine.loaded == 0
        assert {one.verdict for one in found.tried if one.label == "auto"} == {"auto"}


def test_auto_that_dies_as_the_best_is_an_error() -> None:
    for rounds in range(1, 2 + FRESH):
        machine = Machine({"narrow": 0.5}, dies={"auto": rounds})
        with pytest.raises(ExecutionError, match="auto: it burnt down"):
            machine.climb()
        assert machine.loaded == 0


def test_what_was_taken_is_dropped_where_auto_is_not_slower() -> None:
    class Tired(Machine):
        """What is fast while it is chosen is not in the end."""

        def seconds(self, arguments: Mapping[Any, Any]) -> float:
            return 1.0 if self.ran.get("flash", 0) >= 2 + FRESH else super().seconds(arguments)

    found = Tired({"flash": 0.5}).climb()
    assert (found.arguments, found.finished) == ({}, True)
    why = "taken, then dropped: in the end not faster than auto for certain"
    assert tried(found, "flash").verdict == why
    assert found.change is not None
    assert found.change.ratio == pytest.approx(1.0)


def test_the_quality_of_auto_and_of_who_raced_to_the_end_is_known() -> None:
    found = Machine({"flash": 1.0, "slow": 2.0, "half": 0.7, "one": 0.8}, wrong=["half"]).climb()
    assert tried(found, "auto").quality == Quality(10.0, 90, 100)
    for one in found.tried:
        if one.change is not None and one.change.rounds == FRESH:
            assert one.quality is not None, one
    assert tried(found, "half").quality is not None
    assert tried(found, "slow").quality is None


def test_auto_whose_quality_cannot_be_measured_is_an_error_before_anything_else() -> None:
    class Mute(Run):
        def quality(self) -> Quality:
            raise ExecutionError("it says nothing")

    class Muted(Machine):
        def start(
            self, candidates: Sequence[Candidate], most: float, least: float
        ) -> Sequence[Run]:
            return [Mute(self, one.candidate) for one in super().start(candidates, most, least)]

    machine = Muted({"flash": 0.5})
    with pytest.raises(ExecutionError, match=r"auto: its quality.*: it says nothing"):
        machine.climb()
    assert machine.ran == {"auto": 1}
    assert machine.loaded == 0


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
