"""How long a whole process takes that lists the plugins, and one that only imports jackfield."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

CASES = {
    "bare Python": ["-c", "pass"],
    "import jackfield": ["-c", "import jackfield"],
    "jackfield plugins --json": ["-m", "jackfield", "plugins", "--json"],
}


def run(case: str) -> None:
    subprocess.run([sys.executable, *CASES[case]], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("case", list(CASES)[1:])
def benchmark_startup(case: str, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every round also starts a bare interpreter, right before: what is left is our own share."""
    seconds: dict[str, list[float]] = {"bare Python": [], case: []}

    def pair() -> None:
        for name, times in seconds.items():
            start = time.perf_counter()
            run(name)
            times.append(time.perf_counter() - start)

    benchmark.pedantic(pair, rounds=15, warmup_rounds=2)
    bare, whole = (statistics.median(times[2:]) for times in seconds.values())
    benchmark.extra_info.update(seconds=whole, bare=bare)
    with capsys.disabled():
        print(f"\n{case}: {whole:.3f} s, bare interpreter {bare:.3f} s")  # noqa: T201
