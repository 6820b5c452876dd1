"""Killed at any time and run again, a job has every answer once, and the bytes of another run."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
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


#: `jackfield batch`, sent Ctrl-C after `count` lines.
INTERRUPTED = """
import os, signal, sys
from jackfield.batch import results, running
from jackfield.cli import run

class Cut(results.Results):
    def append(self, key, record):
        super().append(key, record)
        if len(self) == {count}:
            os.kill(os.getpid(), signal.SIGINT)

running.Results = Cut
sys.exit(run({arguments!r}))
"""


def test_a_job_that_is_interrupted_goes_on(tmp_path: Path, forks: Forks) -> None:
    source, output = write(tmp_path / "in.jsonl", sorting(20)), tmp_path / "out.jsonl"
    batch = ["batch", str(source), str(output), "--max-batch-size", "2"]
    done = forks.python("-c", INTERRUPTED.format(count=7, arguments=batch))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert 7 <= len(read(output)) < 20
    done = forks.python("-m", "jackfield", *batch)
    assert done.returncode == 0
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(20)]


@pytest.mark.long
def test_two_thousand_lines_killed_five_times(tmp_path: Path) -> None:
    """Each process is killed from outside, when a number of lines drawn at random is there."""
    drawn = random.Random(20)
    source = write(tmp_path / "in.jsonl", sorting(2000))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"

    def batch(to: Path) -> list[str]:
        flags = ["--deterministic", "--max-batch-size", "64"]
        return [sys.executable, "-m", "jackfield", "batch", str(source), str(to), *flags]

    subprocess.run(batch(whole), check=True)
    shutil.copy(f"{whole}.job", f"{output}.job")  # so that both began at the same time
    before = 0
    for count in sorted(drawn.sample(range(20, 1980), 5)):
        with subprocess.Popen(batch(output)) as process:
            while process.poll() is None and len(read_whole(output)) < count:
                time.sleep(drawn.random() / 20)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        lines = read_whole(output)
        assert before <= len(lines) < 2000
        assert len(set(lines)) == len(lines)
        before = len(lines)
    subprocess.run(batch(output), check=True)
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(2000)]
    assert output.read_bytes() == whole.read_bytes()


def read_whole(path: Path) -> list[bytes]:
    """The lines that are not torn."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
