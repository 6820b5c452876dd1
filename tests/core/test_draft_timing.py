"""Strategies whose drafts lose time rest, by a clock that tests set; texts stay what they are."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jackfield
from jackfield.contracts import BindContext, Decoding, DecodingCapabilities, Strategy
from jackfield.engine import draft_timing
from jackfield.engine.draft_timing import FIRST_REST, LONGEST_REST, PLAIN, WINDOW, DraftTiming
from jackfield.errors import PluginError


class Machine:
    """Sequences that decode on a machine of which each step's cost is known.

    A step takes `plain` seconds, proposing `guess`, verifying a draft `verify` more; each of `most`
    drafts is right with probability `rate` while those before it were.
    """

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.now, self.noise, self.rng = 0.0, noise, random.Random(seed)
        self.plain, self.guess, self.verify, self.most, self.rate = 1.0, 0.0, 0.0, 4, 0.5
        self.costs: dict[str, tuple[float, float, float]] = {}
        self.tokens = 0

    def clock(self) -> float:
        return self.now

    def _pass(self, seconds: float) -> None:
        own = seconds * (1 + self.noise * self.rng.uniform(-1, 1))
        self.now += own * (10 if self.noise and self.rng.random() < 0.02 else 1)

    def gain(self, rate: float) -> int:
        """How many of the drafts are right."""
        return next((n for n in range(self.most) if self.rng.random() >= rate), self.most)

    def step(self, timing: DraftTiming, rows: int, names: tuple[str, ...] = ("a",)) -> list[str]:
        """One step of `rows` sequences, parted evenly among `names`; returns who was asked."""
        timing.begin(rows)
        asked, drafted, verified = [], {}, 0.0
        each = max(1, rows // len(names))
        for name in names:
            guess, verify, rate = self.costs.get(name, (self.guess, self.verify, self.rate))
            if not timing.asks(name):
                continue
            asked.append(name)
            before = self.now
            self._pass(guess)
            timing.proposed(name, self.now - before)
            extra = sum(self.gain(rate) for _ in range(each))
            drafted[name] = (each * self.most, extra)
            verified += verify * each * self.most
            self.tokens += extra
        self._pass(self.plain + verified)
        self.tokens += rows
        timing.end(drafted)
        return asked

    def speedup(self, rows: int = 1) -> float:
        """By the formula of Leviathan et al. 2023."""
        gained = sum(self.rate**n for n in range(self.most + 1))
        return gained / ((self.plain + self.guess + self.verify * self.most * rows) / self.plain)


@given(
    seed=st.integers(0, 1 << 20),
    rows=st.sampled_from([1, 2, 8, 33]),
    rate=st.floats(0, 1),
    guess=st.floats(0, 2),
    verify=st.floats(0, 0.5),
    noise=st.sampled_from([0.0, 0.1]),
    unit=st.sampled_from([1e-4, 1.0]),
)
def test_what_loses_time_rests_and_what_saves_it_does_not(
    seed: int, rows: int, rate: float, guess: float, verify: float, noise: float, unit: float
) -> None:
    machine, timing_steps = Machine(seed, noise), 600
    machine.plain, machine.rate = unit, rate
    machine.guess, machine.verify = guess * unit, verify * unit / rows
    timing = DraftTiming({"a": 1.0}, machine.clock)
    asked = sum(bool(machine.step(timing, rows)) for _ in range(timing_steps))
    due = machine.speedup(rows)
    if due < 0.75:
        assert timing.rests["a"] >= 2
        assert asked <= 6 * WINDOW
        # However slow the drafts are, no more than the tries is lost.
    if due > 1.5:
        assert timing.rests["a"] == 0
        assert asked >= timing_steps - 2 * PLAIN
        assert timing.resting == ()


def losing() -> tuple[Machine, DraftTiming]:
    machine = Machine(0)
    machine.guess, machine.rate = 3.0, 0.2
    return machine, DraftTiming({"a": 1.0}, machine.clock)


def test_rests_grow_up_to_the_longest_and_a_good_time_ends_that() -> None:
    machine, timing = losing()
    asked = [bool(machine.step(timing, 1)) for _ in range(6 * LONGEST_REST)]
    rests, length = [], 0
    for one in asked:
        if one and length:
            rests.append(length)
        length = 0 if one else length + 1
    assert rests[0] == PLAIN
    assert rests[1:8] == [FIRST_REST << n for n in range(7)]
    assert max(rests) == LONGEST_REST
    assert timing.rests["a"] == len([n for n in rests if n >= FIRST_REST]) + bool(timing.resting)
    machine.guess, machine.rate = 0.0, 1.0
    while timing.resting:
        machine.step(timing, 1)
    assert all(machine.step(timing, 1) for _ in range(3 * WINDOW))
    machine.guess, machine.rate = 3.0, 0.0
    while not timing.resting:
        machine.step(timing, 1)
    assert timing.resting[0].steps == FIRST_REST


def test_it_is_said_why_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_timing.time, "time", lambda: 1e9)
    machine, timing = losing()
    machine.rate = 0.0
    while not timing.resting:
        machine.step(timing, 2)
    (resting,) = timing.resting
    assert (resting.decoding, resting.rows, resting.since) == ("a", 2, 1e9)
    assert resting.speedup == pytest.approx(0.25)
    assert "with 2 sequences 0.25 times as fast" in str(resting)


def test_each_number_of_sequences_is_judged_by_itself() -> None:
    """Verifying costs a row its own time where many run, and nothing where one does."""
    machine = Machine(1)
    machine.guess, machine.rate = 0.1, 0.8
    timing = DraftTiming({"a": 1.0}, machine.clock)
    asked = {1: 0, 32: 0}
    for at in range(800):
        rows = 1 if at // 50 % 2 else 32
        machine.verify = 0.03 if rows == 32 else 0.0
        asked[rows] += bool(machine.step(timing, rows))
    assert asked[1] >= 400 - 2 * PLAIN
    assert asked[32] <= 4 * WINDOW
    assert {one.rows for one in timing.resting} <= {32}
    assert timing.rests["a"] >= 2


def test_of_two_strategies_in_one_step_only_the_one_that_loses_rests() -> None:
    machine = Machine(2)
    machine.costs = {"good": (0.05, 0.1, 0.9), "bad": (1.5, 0.1, 0.1)}
    timing = DraftTiming({"good": 1.0, "bad": 1.0}, machine.clock)
    for _ in range(800):
        machine.step(timing, 4, ("good", "bad"))
    assert timing.rests["good"] == 0
    assert timing.rests["bad"] >= 2


def test_a_baseline_is_as_old_as_it_may_be() -> None:
    """Drafts that pay for a long text may not for a short one, whose steps take less anyway."""
    machine = Machine(4)
    machine.plain, machine.guess, machine.rate = 5.0, 2.0, 0.6
    timing = DraftTiming({"a": 1.0}, machine.clock)
    for _ in range(1000):
        machine.step(timing, 1)
    assert timing.rests["a"] == 0
    machine.plain = 0.5
    for _ in range(draft_timing.STALE + 3 * WINDOW):
        machine.step(timing, 1)
    assert timing.rests["a"]


def test_texts_that_grow_make_steps_longer_and_nothing_else() -> None:
    """What a step without drafts took long ago is not what it takes now."""
    machine = Machine(3)
    machine.guess, machine.rate = 0.2, 0.6
    timing, asked = DraftTiming({"a": 1.0}, machine.clock), 0
    for at in range(3000):
        machine.plain = 1 + at / 100
        machine.guess = 0.2 * machine.plain
        asked += bool(machine.step(timing, 1))
    assert machine.speedup() > 1.5
    assert timing.rests["a"] == 0
    assert asked > 3000 - 20 * PLAIN


def test_a_clock_that_stands_still_measures_nothing() -> None:
    timing, machine = DraftTiming({"a": 1.0}, lambda: 7.0), Machine(0)
    assert all(machine.step(timing, 1) for _ in range(300))


def test_who_is_not_to_be_measured_is_always_asked() -> None:
    machine, _ = losing()
    timing = DraftTiming({}, machine.clock)
    assert all(machine.step(timing, 1) for _ in range(300))
    assert not timing.resting


PROMPT = [5, 6, 7, 8] * 6
ASKED: dict[str, Any] = {"max_new_tokens": 150, "eos_token_id": None}


def tokens_of(engine: jackfield.Engine) -> list[int]:
    return engine.generate([PROMPT], **ASKED)[0].token_ids


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with jackfield.load("demo") as engine:
        return tokens_of(engine)


def slow_where(engine: jackfield.Engine, seconds: Callable[[int], float]) -> None:
    """A clock of the engine's: a step takes what `seconds` says for the tokens that it feeds."""
    loop, now = engine._loop, [0.0]
    forward = loop.forward

    def timed(inputs: Any) -> Any:
        now[0] += seconds(inputs.kwargs["input_ids"].numel())
        return forward(inputs)

    loop.forward = timed
    loop.decoding.timing.clock = lambda: now[0]


LOOKUP = "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1"


def test_an_engine_puts_its_strategy_to_rest_and_says_so(
    plain: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with jackfield.load("demo", decoding=LOOKUP) as engine:
        slow_where(engine, lambda tokens: float(tokens**2))
        with caplog.at_level(logging.INFO, "jackfield"):
            (completion,) = engine.generate([PROMPT], **ASKED)
        seen, figures = engine.report().speculation, engine.statistics().speculation
    assert completion.token_ids == plain
    assert seen is not None
    assert seen == figures
    assert seen.rests >= 1
    assert seen.proposed
    own = completion.report.speculation
    assert own is not None
    (resting,) = seen.resting
    assert own.resting == (resting,)
    assert (resting.decoding, resting.rows) == ("prompt_lookup", 1)
    assert resting.speedup < 1
    assert "rests since" in str(engine.report())
    assert f"no drafts for {resting.steps} steps" in caplog.text
    assert seen.to_dict()["resting"][0]["decoding"] == "prompt_lookup"


@pytest.mark.parametrize(
    ("selection", "seconds"),
    [(LOOKUP, lambda tokens: 1.0), (f"{LOOKUP}&min_speedup=0", lambda tokens: float(tokens**2))],
    ids=["saves time", "whatever it costs"],
)
def test_an_engine_goes_on_with_one_that(
    plain: list[int], selection: str, seconds: Callable[[int], float]
) -> None:
    with jackfield.load("demo", decoding=selection) as engine:
        slow_where(engine, seconds)
        assert tokens_of(engine) == plain
        seen = engine.report().speculation
    assert seen is not None
    assert (seen.rests, seen.resting) == (0, ())


@pytest.mark.parametrize("speed", ["fast", -1, float("nan"), float("inf"), None, True])
def test_a_speed_that_is_none_is_named_with_its_plugin(
    plug: Callable[[Any], str], speed: Any
) -> None:
    class Odd(Strategy):
        min_speedup = speed

        def propose(self, sequences: Any, max_drafts: Any) -> list[list[int]]:
            return [[] for _ in sequences]

    class Offers(Decoding):
        name = "odd"
        capabilities = DecodingCapabilities(rollback=True)

        def bind(self, context: BindContext) -> Strategy:
            return Odd()

    with pytest.raises(PluginError, match=r"stranger.*min_speedup must be a number of 0 or more"):
        jackfield.load("demo", decoding=plug(Offers()))
