"""Two ways to do one thing, timed in turn in one process: these machines drift, ratios do not."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from workload import CLOCK

Run = Callable[[], Any]


@pytest.fixture
def alternate(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> Callable[[Run, Run, float], float]:
    """`alternate(ours, theirs, units)`: times both in turn, prints and returns their ratio.

    Both must return the same value: a number without equal output is not a result. `units` is how
    much work one run does (tokens). The ratio is the median over pairs; more than 1: ours is
    faster. Every round counts once for pytest-benchmark, with the time of both.
    """

    def measure(ours: Run, theirs: Run, units: float, rounds: int = 11) -> float:
        mine: list[float] = []
        others: list[float] = []

        def pair() -> None:
            for run, seconds in ((theirs, others), (ours, mine)):
                start = CLOCK()
                run()
                seconds.append(CLOCK() - start)

        assert ours() == theirs()
        benchmark.pedantic(pair, rounds=rounds)
        ratios = sorted(b / a for a, b in zip(mine, others, strict=True))
        ratio = statistics.median(ratios)
        speed = [units / statistics.median(seconds) for seconds in (mine, others)]
        benchmark.extra_info.update(ratio=ratio, ours=speed[0], theirs=speed[1])
        with capsys.disabled():
            print(  # noqa: T201 - the figures are what this is for
                f"\n{benchmark.name}: {speed[0]:.1f}/s against {speed[1]:.1f}/s, "
                f"ratio {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
        return ratio

    return measure
