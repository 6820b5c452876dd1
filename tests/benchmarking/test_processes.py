"""Contenders in processes: one that crashes or hangs is a row, and the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jackfield.benchmarking.contenders import Contender, product
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.running import bench
from jackfield.benchmarking.worker import Worker
from jackfield.benchmarking.workload import Shape, preset
from jackfield.errors import CheckpointError, ExecutionError, UsageError

if TYPE_CHECKING:
    from conftest import Liars


def test_a_process_raises_here_what_it_raised_there() -> None:
    with Worker() as worker:
        asked = {"program": "jackfield", "arguments": {"model": "./nowhere"}, "requests": []}
        with pytest.raises(CheckpointError, match="is not a folder"):
            worker.ask("load", **asked)
        with pytest.raises(UsageError, match="names only"):
            worker.ask("load", arguments={"model": object()})
        with pytest.raises(ExecutionError, match="'do_nothing'"):
            worker.ask("nothing")
        worker._process.kill()
        with pytest.raises(ExecutionError, match="its process ended with SIGKILL"):
            worker.ask("settled")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_crashes_hangs_or_lies_is_a_row_and_others_go_on(liars: Liars) -> None:
    liars("crash", "hang", "early", "wrong", "inside")
    names = ["sdpa", "crash", "hang", "early", "wrong", "inside", "eager"]
    common = {"model": "demo", "dtype": "float32", "cache_implementation": "dynamic"}
    rows = product({"attention": names}, common)
    shape = Shape(requests=2, prompt_tokens=30, new_tokens=16)
    work = preset("chat", shape, *reader(Contender("demo", common)))
    found = bench(rows, work, rounds=3, seconds=20)
    reasons = {row.label: " ".join(row.reasons) for row in found.rows}
    assert reasons["sdpa"] == reasons["eager"] == ""
    assert "failed: its process ended with exit code 7" in reasons["crash"]
    assert "failed: it did not end within 20 s" in reasons["hang"]
    assert "got 3 tokens and asked for 16" in reasons["early"]
    assert "wrong tokens" in reasons["wrong"]
    assert "called what sdpa does" in reasons["inside"]
    assert found["sdpa"].peak_bytes is not None
    assert 1e6 < found["sdpa"].peak_bytes < 1e9
