"""A race says "faster" as often as it may where nobody is, and nearly always where somebody is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import cast

import pytest

from jackfield.tuning.candidates import Candidate, Runner
from jackfield.tuning.racing import FRESH, Racer, duel, most_rounds, race

RACES = 600


@dataclass
class Program:
    """Takes `seconds` a round, with a spread of `noise`."""

    seconds: float
    noise: float
    chance: random.Random
    error: str | None = None
    rounds: int = 0
    took: float = 0.0

    def round(self) -> float:
        self.rounds += 1
        return self.seconds * self.chance.lognormvariate(0.0, self.noise)


def racer(seconds: float, noise: float, chance: random.Random) -> Racer:
    program = Program(seconds, noise, chance)
    return Racer(Candidate("rung", f"{seconds}", {}), cast("Runner", program))


def rounds(one: Racer) -> int:
    return cast("Program", one.runner).rounds


def has_time() -> bool:
    return True


@pytest.mark.parametrize("count", [1, 4, 16])
def test_of_programs_that_are_equally_fast_few_are_called_faster(count: int) -> None:
    chance, wrong = random.Random(count), 0
    for _ in range(RACES):
        best, *others = [racer(1.0, 0.05, chance) for _ in range(count + 1)]
        wrong += race(best, others, has_time) is not None
        assert rounds(best) + sum(map(rounds, others)) <= most_rounds(count)
    assert wrong <= 0.04 * RACES, wrong


def test_the_last_race_is_wrong_as_seldom() -> None:
    chance = random.Random(0)
    wrong = sum(
        duel(racer(1.0, 0.05, chance), racer(1.0, 0.05, chance), has_time) for _ in range(RACES)
    )
    assert wrong <= 0.04 * RACES, wrong


@pytest.mark.parametrize("count", [1, 4, 16])
def test_who_is_a_tenth_faster_is_found(count: int) -> None:
    chance, found = random.Random(count), 0
    for _ in range(200):
        best = racer(1.0, 0.03, chance)
        others = [racer(0.9, 0.03, chance), *(racer(1.0, 0.03, chance) for _ in range(count - 1))]
        found += race(best, others, has_time) is others[0]
    assert found >= 0.9 * 200, found


def test_one_that_challenges_has_twelve_rounds_at_most() -> None:
    chance = random.Random(1)
    for seconds in (0.5, 0.99, 1.0, 1.01, 3.0):
        best, other = racer(1.0, 0.02, chance), racer(seconds, 0.02, chance)
        race(best, [other], has_time)
        assert rounds(other) <= 12


def test_rounds_that_chose_somebody_do_not_judge_it() -> None:
    """By luck it was fast while it was chosen."""
    chance = random.Random(2)
    best, other = racer(1.0, 0.0, chance), racer(1.0, 0.0, chance)
    program = cast("Program", other.runner)

    def lucky() -> float:
        program.rounds += 1
        return 0.5 if program.rounds <= 2 else 1.01

    program.round = lucky  # type: ignore[method-assign]
    cast("Program", best.runner).round = lambda: 1.0  # type: ignore[method-assign]
    assert race(best, [other], has_time) is None
    assert other.verdict == "behind after 3 rounds"
    assert len(other.times) == 3 < FRESH


def test_without_time_nothing_is_decided() -> None:
    left = iter([True] * 6)
    best, other = racer(1.0, 0.0, random.Random(3)), racer(0.5, 0.0, random.Random(3))
    assert race(best, [other], lambda: next(left, False)) is None
    assert other.verdict == "no time was left after 4 rounds"
    assert other.change is None
