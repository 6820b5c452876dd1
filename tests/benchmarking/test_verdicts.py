"""Intervals of ratios: exact as in textbooks, right as often as they say, on noise with spikes."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from jackfield.benchmarking.results import ordered
from jackfield.benchmarking.verdicts import (
    FEWEST,
    Change,
    Verdict,
    _ranks_signed,
    _ranks_summed,
    apart,
    paired,
)


@pytest.mark.parametrize("count", [1, 2, 5, 9, 14])
def test_signed_ranks_are_counted_as_scipy_does(count: int) -> None:
    values = [float(n) for n in range(1, count + 1)]
    ways = _ranks_signed(count)
    assert sum(ways) == 2**count
    for negative in range(count):
        signed = [-v if n < negative else v for n, v in enumerate(values)]
        rank = sum(range(1, negative + 1))
        told = stats.wilcoxon(signed, method="exact", alternative="greater").pvalue
        assert sum(ways[: rank + 1]) / 2**count == pytest.approx(told)


@pytest.mark.parametrize(("one", "other"), [(1, 1), (3, 5), (6, 4), (7, 7)])
def test_summed_ranks_are_counted_as_scipy_does(one: int, other: int) -> None:
    ways = _ranks_summed(one, other)
    assert sum(ways) == math.comb(one + other, one)
    first = list(range(one))
    second = [n + one - 0.5 for n in range(other)]
    told = stats.mannwhitneyu(first, second, method="exact", alternative="less")
    assert sum(ways[: int(told.statistic) + 1]) / sum(ways) == pytest.approx(told.pvalue)


def noisy(chance: random.Random, times: float = 1.0) -> float:
    """A time with a little noise always, and a lot of it sometimes: others use the machine."""
    spike = chance.expovariate(5) if chance.random() < 0.1 else 0.0
    return times * math.exp(chance.gauss(0, 0.03) + spike)


def runs(slower: float, rounds: int, count: int = 150) -> list[Change]:
    chance = random.Random(f"{slower} {rounds}")
    found = []
    for _ in range(count):
        pairs = [(noisy(chance), noisy(chance, slower)) for _ in range(rounds)]
        found.append(paired(*zip(*pairs, strict=True)))
    return found


def share(found: list[Change], verdict: Verdict) -> float:
    return sum(one.verdict is verdict for one in found) / len(found)


@pytest.mark.parametrize("slower", [1.0, 1.1, 0.8])
@pytest.mark.parametrize("rounds", [6, 15])
def test_an_interval_is_right_as_often_as_it_says(slower: float, rounds: int) -> None:
    inside = [one.low <= slower <= one.high for one in runs(slower, rounds)]
    assert sum(inside) / len(inside) >= 0.92  # of 150 draws of 0.95


def test_a_slowdown_of_a_tenth_is_found_and_none_is_made_up() -> None:
    assert share(runs(1.1, 30), Verdict.SLOWER) > 0.9
    assert share(runs(1 / 1.1, 30), Verdict.FASTER) > 0.9
    same = runs(1.0, 30)
    assert share(same, Verdict.UNCHANGED) > 0.9
    assert share(same, Verdict.SLOWER) + share(same, Verdict.FASTER) < 0.03


def test_two_runs_are_compared_like_pairs() -> None:
    chance = random.Random(0)
    found = [
        apart([noisy(chance) for _ in range(20)], [noisy(chance, 1.2) for _ in range(25)])
        for _ in range(200)
    ]
    assert share(found, Verdict.SLOWER) > 0.9
    assert sum(one.low <= 1.2 <= one.high for one in found) >= 0.92 * 200
    assert {one.rounds for one in found} == {20}


def test_few_rounds_decide_nothing() -> None:
    few = paired([1.0] * (FEWEST - 1), [2.0] * (FEWEST - 1))
    assert (few.ratio, few.low, few.high) == (2.0, 0.0, math.inf)
    assert few.verdict is Verdict.UNDECIDED
    assert few.needed == 2 * (FEWEST - 1)
    assert few.to_dict()["low"] is None
    enough = paired([1.0] * FEWEST, [2.0] * FEWEST)
    assert (enough.low, enough.high, enough.verdict) == (2.0, 2.0, Verdict.SLOWER)
    assert enough.needed is None


VERDICTS = [
    (1.01, 1.04, Verdict.UNCHANGED),  # certain, and too small to count
    (0.96, 1.04, Verdict.UNCHANGED),
    (1.02, 1.08, Verdict.SLOWER),
    (0.90, 0.99, Verdict.FASTER),
    (0.98, 1.08, Verdict.UNDECIDED),
    (0.90, 1.10, Verdict.UNDECIDED),
]


@pytest.mark.parametrize(("low", "high", "verdict"), VERDICTS)
def test_a_verdict_is_read_off_the_interval(low: float, high: float, verdict: Verdict) -> None:
    change = Change(math.sqrt(low * high), low, high, 10)
    assert change.verdict is verdict
    assert (change.needed is None) == (verdict is not Verdict.UNDECIDED)
    if change.needed:
        assert change.needed > 10


def test_as_many_rounds_as_are_said_to_be_needed_decide() -> None:
    undecided = [one for one in runs(1.0, 10) if one.needed]
    needed = sorted(one.needed or 0 for one in undecided)[len(undecided) // 2]
    assert share(runs(1.0, needed), Verdict.UNDECIDED) < 0.5


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_row_is_first_and_last_equally_often(count: int) -> None:
    rows = list(range(count))
    orders = [ordered(rows, number) for number in range(2 * count)]
    assert all(sorted(order) == rows for order in orders)
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted([*rows, *rows])


def test_drift_is_not_taken_for_a_difference() -> None:
    """A machine that gets slower while it is measured does so for both."""
    times: dict[str, list[float]] = {"a": [], "b": []}
    now = 1.0
    for number in range(12):
        for name in ordered(["a", "b"], number):
            times[name].append(now)
            now *= 1.02
    assert paired(times["a"], times["b"]).verdict is Verdict.UNCHANGED
