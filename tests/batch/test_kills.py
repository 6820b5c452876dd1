"""Killed at any time and run again, a job has every answer once, and the bytes of another run."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jobs import asks, errors_of, read, sorting, write

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

#: `jackfield batch`, killed in the middle of the line with which OUT grows beyond `size`.
KILLED = """
import os, random, signal
from jackfield.batch import results, running
from jackfield.cli import run

class Cut(results.Results):
    def append(self, key, record):
        super().append(key, record)
        if self._end > {size}:
            os.truncate(self._path, random.randint({size}, self._end))
            os.kill(os.getpid(), signal.SIGKILL)

running.Results = Cut
run({arguments!r})
"""


def test_a_job_that_is_killed_goes_on_to_the_same_bytes(tmp_path: Path, forks: Forks) -> None:
    lines: list[Any] = sorting(40)
    lines[5:5] = ["no JSON", asks("bad", temperature=9), lines[2]]
    source = write(tmp_path / "in.jsonl", lines)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"

    def batch(to: Path) -> list[str]:
        return ["batch", str(source), str(to), "--deterministic"]

    assert forks.python("-m", "jackfield", *batch(whole)).returncode == 1
    shutil.copy(f"{whole}.job", f"{output}.job")  # so that both began at the same time
    size = whole.stat().st_size
    for share in (0.3, 0.7):
        killed = KILLED.format(size=int(size * share), arguments=batch(output))
        assert forks.python("-c", killed).returncode == -signal.SIGKILL
        assert int(size * share) <= output.stat().st_size < size
    done = forks.python("-m", "jackfield", *batch(output))
    assert done.returncode == 1
    assert done.stderr.startswith("40 of 43 lines are answered, ")
    assert output.read_bytes() == whole.read_bytes()
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(40)]
    assert errors_of(output) == errors_of(whole)
    assert list(errors_of(output)) == [6, 7, 8]
