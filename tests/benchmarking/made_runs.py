"""Runs that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.benchmarking.results import Benchmark, Round, Row

WORK = {
    "name": "chat", "requests": 2, "prompt_tokens": 20, "new_tokens": 10, "batch": 2,
    "arrivals": False, "seed": 0, "digest": "d",
}  # fmt: skip
LIMITS = {
    "where": "cpu float32", "bytes_read": 10**9, "flops": 10**10, "bandwidth": 4e10,
    "flop_rate": 2e11, "seconds": 0.05,
}  # fmt: skip


def row(label: str, times: Sequence[float], program: str = "jackfield", **more: Any) -> Row:
    rounds = tuple(Round(seconds, seconds / 4, seconds / 20) for seconds in times)
    return Row(
        label, program, {"model": "demo"}, rounds=rounds, warm_up=(1.0,), limits=LIMITS,
        peak_bytes=50_000_000, weight_bytes=14_000_000, **more,
    )  # fmt: skip


def run(
    *rows: Row, work: Mapping[str, Any] = WORK, machine: str = "a processor", torch: str = "2"
) -> Benchmark:
    around = {
        "versions": {"torch": torch}, "hardware": machine, "cores": 2,
        "date": "2026-01-01T00:00:00+00:00", "command": "jackfield bench",
    }  # fmt: skip
    return Benchmark(rows, work, rows[0].label, surroundings=around)


FAST = [0.1 + n / 1000 for n in range(12)]
SLOW = [1.3 * seconds for seconds in FAST]
