"""Contenders in processes: one that crashes or hangs is a row, and the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jackfield.benchmarking.contenders import Contender, product
from jackfield.benchmarking.nursery import Nursery, usable
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.running import Running, bench
from jackfield.benchmarking.worker import Worker
from jackfield.benchmarking.workload import Request, Shape, Workload, preset
from jackfield.errors import CheckpointError, ExecutionError, UsageError

if TYPE_CHECKING:
    from conftest import Liars


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    if not usable():
        pytest.skip("nothing is forked here")
    with Nursery() as made:
        made.ready()
        yield made


def test_what_is_forked_raises_and_ends_as_what_begins_from_nothing(nursery: Nursery) -> None:
    _raises_here_what_it_raised_there(nursery)
    first, second = Worker(nursery), Worker(nursery)
    with first, second:
        assert first._process.pid != second._process.pid
        with pytest.raises(ExecutionError, match="did not end within"):
            first.ask("load", 0.01, program="jackfield", arguments={"model": "demo"}, requests=[])
    assert [first._process.returncode, second._process.returncode] == [-9, -9]


def test_what_is_forked_computes(nursery: Nursery) -> None:
    asked = {"model": "demo", "attn_implementation": "sdpa"}
    with Worker(nursery) as worker:
        requests = [([5, 6, 7], 4, 0.0)]
        told = worker.ask("load", program="jackfield", arguments=asked, requests=requests)
        assert told["plan"]["chosen"]["attention"]["name"] == "sdpa"
        worker.ask("settled")
        (tokens,) = worker.ask("round", number=0)["tokens"]
        assert len(tokens) == 4
        read = worker.ask("quality", text=[5, 6, 7, 8], answers=[["Hi", "no such answer", 2]])
        assert read["perplexity"] > 1
        assert (read["right"], read["total"]) == (0, 1)
        assert worker.ask("finish")["report"]["attention"]["name"] == "sdpa"


@pytest.mark.long
def test_what_is_forked_has_as_many_threads_as_what_begins_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By how many there are OpenMP's threads sleep or spin, and a step takes twice as long."""
    if not usable():
        pytest.skip("nothing is forked here")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    asked = {"program": "jackfield", "arguments": {"model": "demo"}, "requests": [((5,), 9, 0)]}
    with Nursery() as made:
        for worker in (Worker(made), Worker()):
            with worker:
                tasks = Path(f"/proc/{worker._process.pid}/task")
                worker.ask("load", **asked)
                worker.ask("round", number=0)
                before = {*tasks.iterdir()}
                worker.ask("quality", text=[*range(5, 300)], answers=[])
                own = {*tasks.iterdir()} - before  # of the thread that asks: none was left of it
                assert own
                worker.ask("round", number=0)
                assert not own & {*tasks.iterdir()}


def test_a_nursery_that_has_ended_is_an_error() -> None:
    if not usable():
        pytest.skip("nothing is forked here")
    with Nursery() as made:
        made._process.kill()
        with pytest.raises(ExecutionError, match="that others are forked from has ended"):
            Worker(made)


@pytest.mark.parametrize("error", [ExecutionError("it has ended"), OSError(11, "no more of them")])
def test_a_process_that_cannot_be_begun_is_a_row(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(nursery: Nursery | None) -> Worker:
        raise error

    monkeypatch.setattr("jackfield.benchmarking.running.begun", failing)
    work = Workload("one", (Request((5, 6), 2),), 1)
    one = Running(Contender("demo", {"model": "demo"}), work, 5.0)
    with contextlib.ExitStack() as open_ones:
        one.start(open_ones)
        one.warm_up()
        one.round(0)
    assert one.error is not None
    assert one.row.rounds == ()
    assert one.row.reasons == (f"failed: {one.error}",)


def test_who_waits_for_a_nursery_waits_no_longer_than_he_says() -> None:
    with Nursery() as made, pytest.raises(TimeoutError):
        made.ready(0.001)


def test_a_process_raises_here_what_it_raised_there() -> None:
    _raises_here_what_it_raised_there(None)


def _raises_here_what_it_raised_there(nursery: Nursery | None) -> None:
    with Worker(*([] if nursery is None else [nursery])) as worker:
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


def test_after_an_interruption_nothing_takes_the_answer_of_another_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Worker() as worker:

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(worker._wire, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                worker.ask("finish")
        with pytest.raises(ExecutionError, match="ended with SIGKILL"):
            worker.ask("finish")
