"""How long a whole process takes that lists the plugins, and one that only imports jackfield."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

BARE = ("-c", "pass")
CASES = {
    "import jackfield": ("-c", "import jackfield"),
    "jackfield plugins --json": ("-m", "jackfield", "plugins", "--json"),
}


def start(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of wall time and of processor time, which other work on the machine disturbs less."""
    wall, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user - before.children_user
    spent += after.children_system - before.children_system
    return time.perf_counter() - wall, spent


@pytest.mark.parametrize("case", CASES)
def benchmark_startup(case: str, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A bare interpreter is started before each round; what is more than it is our own share."""
    bare: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []

    def pair() -> None:
        bare.append(start(BARE))
        ours.append(start(CASES[case]))

    benchmark.pedantic(pair, rounds=15, warmup_rounds=1)
    texts = []
    for name, rows in ((case, ours), ("bare interpreter", bare)):
        wall, spent = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        benchmark.extra_info[name] = {"wall": wall, "processor": spent}
        texts.append(f"{name}: {wall:.3f} s, {spent:.3f} s of processor time")
    with capsys.disabled():
        print("\n" + "; ".join(texts))  # noqa: T201
