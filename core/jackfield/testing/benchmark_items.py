"""``pytest --jackfield-bench plugin:NAME``: a backend beside what auto chooses, as a benchmark.

It is measured as `jackfield bench` does, in turn and in processes of their own. pytest-benchmark is
then told of each round, so that its tables and saved runs have it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jackfield.benchmarking.results import Benchmark


class Clock:
    """What pytest-benchmark reads the time from: it stands still but for rounds that were."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rounds: Iterator[float] = iter(())

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        """One round."""
        self.now += next(self.rounds)


class BenchmarkNode(pytest.Collector):
    """The benchmark of one backend."""

    def collect(self) -> Iterable[pytest.Item]:
        if not self.config.pluginmanager.hasplugin("benchmark"):
            raise pytest.UsageError(
                "--jackfield-bench needs pytest-benchmark: pip install pytest-benchmark"
            )
        return [pytest.Function.from_parent(self, name="bench", callobj=_measured(self.name))]


def _beside_auto(selection: str) -> Benchmark:
    """The demo model's chats with that backend and without."""
    from jackfield.benchmarking.contenders import product
    from jackfield.benchmarking.preparing import reader
    from jackfield.benchmarking.running import bench
    from jackfield.benchmarking.workload import Shape, preset
    from jackfield.testing.subject import subject_of

    kind = subject_of(selection).kind
    rows = product({kind: ["auto", selection]}, {"model": "demo"})
    return bench(rows, preset("chat", Shape(), *reader(rows[0])))


def _measured(selection: str) -> Callable[[Any], None]:
    """A test of that backend; it fails where its row is no result."""
    clock = Clock()

    @pytest.mark.benchmark(timer=clock, group=f"jackfield bench {selection}")
    def measured(request: pytest.FixtureRequest) -> None:
        from jackfield.errors import JackfieldError

        try:
            found = _beside_auto(selection)
        except JackfieldError as error:
            pytest.fail(f"cannot measure {selection}: {error}", pytrace=False)
        row, change = found.rows[1], found.change(found.rows[1])
        if not row.valid:
            pytest.fail(f"{selection} is no result: {'; '.join(row.reasons)}", pytrace=False)
        clock.rounds = iter(row.times)
        benchmark: Any = request.getfixturevalue("benchmark")  # one that is not used is a warning
        benchmark.pedantic(clock.run, rounds=len(row.times))
        benchmark.extra_info |= {
            "tokens_per_second": found.workload["new_tokens"] / row.seconds,
            "beside_auto": change.to_dict() if change else None,
        }

    test: Callable[[Any], None] = measured
    return test
