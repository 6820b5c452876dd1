"""Batch jobs that replicas answer: the files of one engine, whatever is lost meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import imports_ray, linux, on_ray, replicas
from jobs import asks, errors_of, job, read, sorting, write

from jackfield import cli
from jackfield.batch.lines import Line
from jackfield.batch.running import Outcome, run
from jackfield.errors import ExecutionError
from jackfield.replicas.calls import LineCall, ReplicaLostError
from jackfield.replicas.lines import RayLines
from jackfield.replicas.prefixes import OpenRequests, Prefixes
from jackfield.replicas.replica import Replica, versions
from jackfield.serving.errors import ApiError
from jackfield.serving.settings import ServerSettings


class Handle:
    """What Ray's handle is, for replicas in this process.

    `losing` says, for each line that is asked, whether its replica is lost just then.
    """

    def __init__(self, settings: ServerSettings, count: int, losing: Callable[[], bool]) -> None:
        self._settings, self._losing = settings, losing
        self._prefixes, self._requests = Prefixes(), OpenRequests()
        self.there: dict[str, Replica] = {}
        self.made = 0
        self._filling = asyncio.Lock()
        self.count = count
        self.line = SimpleNamespace(remote=self._line)
        self.report = SimpleNamespace(remote=self._report)

    async def fill(self) -> None:
        async with self._filling:
            while len(self.there) < self.count:
                replica = Replica(self._settings, versions(), f"r{self.made}")
                self.made += 1
                await replica.open()
                self.there[replica.name] = replica

    def broadcast(self, _: str) -> Any:
        async def told(timeout_s: float) -> Any:
            await self.fill()
            return [(replica.made, replica.ran) for replica in self.there.values()]

        return SimpleNamespace(results_async=told)

    async def _line(self, call: LineCall) -> Any:
        call = copy.deepcopy(call)
        while not (names := [name for name in self.there if name not in call.lost]):
            await asyncio.sleep(0.01)
        name = self._prefixes.choose(call.blocks, self._requests.loads(names))[0]
        self._requests.begin(call.name, name)
        replica = self.there[name]
        if self._losing():
            (served,) = replica.pool.models.values()
            assert served.engine is not None
            served.engine.close()  # as that of ranks which are gone
            del self.there[name]
            await self.fill()
        try:
            found: Any = await replica.line(call)
        except ReplicaLostError:
            found = None
        self._requests.end(call.name, name)
        return replica.name, replica.made, copy.deepcopy(found)

    async def _report(self) -> Any:
        return next(iter(self.there.values())).engine.report()


class Elsewhere:
    def __init__(self, count: int, losing: Callable[[], bool] = lambda: False) -> None:
        self.count, self._losing = count, losing

    @contextlib.contextmanager
    def answerer(self, settings: ServerSettings, _: str) -> Iterator[RayLines]:
        self.handle = Handle(settings, self.count, self._losing)
        yield RayLines(self.handle)  # type: ignore[arg-type]


def same_job(source: Path, folder: Path, elsewhere: Any) -> tuple[Path, Path, Outcome]:
    """The outputs of an engine here and of replicas elsewhere, for one job."""
    whole, output = folder / "whole.jsonl", folder / "out.jsonl"
    run(job(source, whole, deterministic=True), lambda done, of: None)
    shutil.copy(f"{whole}.job", f"{output}.job")  # so that both began at the same time
    return (
        whole,
        output,
        run(job(source, output, deterministic=True), lambda done, of: None, elsewhere),
    )


@on_ray
@imports_ray
@pytest.mark.parametrize("losses", [(), (3, 17)])
def test_replicas_make_the_files_of_one_engine(tmp_path: Path, losses: tuple[int, ...]) -> None:
    lines: list[Any] = sorting(24)
    lines[5:5] = ["no JSON", asks("bad", temperature=9), lines[2]]
    numbers = iter(range(1000))
    elsewhere = Elsewhere(2, lambda: next(numbers) in losses)
    source = write(tmp_path / "in.jsonl", lines)
    whole, output, outcome = same_job(source, tmp_path, elsewhere)
    assert elsewhere.handle.made == 2 + len(losses)
    assert (outcome.answered, outcome.failed, outcome.before) == (24, 3, 0)
    assert output.read_bytes() == whole.read_bytes()
    assert errors_of(output) == errors_of(whole)
    assert next(numbers) >= 24 + len(losses)  # what was lost was asked again


@on_ray
@imports_ray
def test_a_line_that_ends_replicas_fails() -> None:
    async def act() -> None:
        asked: list[LineCall] = []

        async def line(call: LineCall) -> Any:
            asked.append(call)
            return f"r{len(asked)}", "made", None

        lines = RayLines(SimpleNamespace(line=SimpleNamespace(remote=line)))  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="3 replicas were lost with this line") as caught:
            await lines.answer(Line.model_validate(asks("a")), "name", 0)
        assert caught.value.status == 500  # so that it is asked again when the job is run again
        assert [call.lost for call in asked] == [(), ("r1",), ("r1", "r2")]

    asyncio.run(act())


@on_ray
@imports_ray
def test_replicas_that_chose_otherwise_are_told() -> None:
    async def act(told: list[Any], answered: str) -> None:
        async def results_async(timeout_s: float) -> Any:
            return told

        async def line(_: LineCall) -> Any:
            return "r1", answered, {}

        handle: Any = SimpleNamespace(
            broadcast=lambda _: SimpleNamespace(results_async=results_async),
            line=SimpleNamespace(remote=line),
        )
        lines = RayLines(handle)
        async with lines.open():
            await lines.answer(Line.model_validate(asks("a")), "name", 0)

    asyncio.run(act([("one", None), ("one", None)], "one"))
    for told, answered in ([("one", None), ("two", None)], "one"), ([("one", None)], "two"):
        with pytest.raises(ExecutionError, match="chose different plans"):
            asyncio.run(act(told, answered))


def test_an_error_goes_to_another_process_as_it_is() -> None:
    error = ApiError(429, "too many", param="n", code="full", retry_after=7)
    found = copy.deepcopy(error)  # as pickle would
    assert (found.status, str(found), found.body(), found.headers) == (
        429, "too many", error.body(), {"Retry-After": "7"},
    )  # fmt: skip


def test_an_address_is_of_replicas(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", sorting(1))
    output = str(tmp_path / "out.jsonl")
    assert cli.run(["batch", str(source), output, "--ray-address", "127.0.0.1:1"]) == 2
    assert "--replicas N" in capsys.readouterr().err
    assert cli.run(["batch", str(source), output, "--replicas", "x"]) == 2
    assert "--replicas x" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def batch(source: Path, to: Path, *more: str) -> list[str]:
    flags = ["--deterministic", "--max-batch-size", "8", *more]
    return [sys.executable, "-m", "jackfield", "batch", str(source), str(to), *flags]


NEVER = 10**6  # so many lines are never there


def killed_while(command: list[str], output: Path, replica_at: int, command_at: int) -> int:
    """Run a command, and kill a replica and then it itself once so many lines are there; its exit
    code.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        for at in (replica_at, command_at):
            while process.poll() is None and len(whole_lines(output)) < at:
                time.sleep(0.02)
            if process.poll() is None:
                os.kill(replicas()[0] if at == replica_at else process.pid, signal.SIGKILL)
        return process.wait()


def whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


@on_ray
@linux
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_replica_is_killed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", sorting(30))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    subprocess.run(batch(source, whole), check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    shutil.copy(f"{whole}.job", f"{output}.job")
    assert killed_while(batch(source, output, "--replicas", "2"), output, 5, NEVER) == 0
    assert output.read_bytes() == whole.read_bytes()
    until_none(replicas)


@on_ray
@linux
@pytest.mark.long
@pytest.mark.parametrize(("count", "kills"), [(60, 1), (600, 4)])
@pytest.mark.timeout(1800)
def test_driver_and_replicas_are_killed(tmp_path: Path, count: int, kills: int) -> None:
    """In turn a replica, which the job survives, and the command, which is run again."""
    drawn = random.Random(count)
    source = write(tmp_path / "in.jsonl", sorting(count))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(batch(source, whole), check=True, env=alone)
    shutil.copy(f"{whole}.job", f"{output}.job")
    on = batch(source, output, "--replicas", "2")
    times = sorted(drawn.sample(range(5, count - 20), 2 * kills))
    for replica_at, command_at in zip(times[::2], times[1::2], strict=True):
        assert killed_while(on, output, replica_at, command_at) == -signal.SIGKILL
        assert command_at <= len(whole_lines(output)) < count
        until_none(replicas)
    assert killed_while(on, output, times[-1] + 5, count + 1) == 0
    assert [line["custom_id"] for line in read(output)] == [f"line {at}" for at in range(count)]
    assert output.read_bytes() == whole.read_bytes()
    until_none(replicas)


def until_none(of: Callable[[], list[int]]) -> None:
    """Wait until processes have ended."""
    end = time.monotonic() + 60
    while of():
        assert time.monotonic() < end, of()
        time.sleep(0.1)
