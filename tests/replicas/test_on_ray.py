"""Replicas on Ray: what a command line says wrong, and clusters of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import extras
import httpx
import openai
import pytest

from jackfield import cli
from jackfield.errors import UsageError
from jackfield.replicas import cluster
from jackfield.replicas.cluster import Count

on_ray = extras.marked("ray")
imports_ray = pytest.mark.filterwarnings("ignore")  # Ray's modules use what others gave up
TELL = {"model": "demo", "prompt": "Tell me", "max_tokens": 200, "temperature": 0,
        "logit_bias": {"0": -100, "1": -100}}  # fmt: skip


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a mistake."""
    assert cli.run(["serve", "demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("count", ["0", "-1", "x", "2:1", "0:3", "1:2:3", "", ":", "1.5"])
def test_a_number_of_replicas_that_cannot_be(
    capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert "--replicas" in failed(capsys, f"--replicas={count}")


def test_numbers_of_replicas() -> None:
    assert (Count.of("3"), Count.of("1:4")) == (Count(3, 3), Count(1, 4))


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tp and --replicas" in failed(capsys, "--replicas", "2", "--tp", "2")
    assert "--replicas N" in failed(capsys, "--ray-address", "127.0.0.1:1")


def test_a_port_in_use_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert port in failed(capsys, "--replicas", "2", "--port", port)


@pytest.mark.parametrize("library", ["ray", "grpc"])
def test_without_ray_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert "pip install jackfield[ray]" in failed(capsys, "--replicas", "2", "--port", "0")


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:1", "127.0.0.1:", "a b"])
def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str], address: str) -> None:
    said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
    assert "HOST:PORT" in said


@on_ray
@imports_ray
def test_an_address_where_no_cluster_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REACHED_WITHIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
        assert f"{address}: no cluster of Ray answers" in said
    said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
    assert "no cluster of Ray answers" in said


@on_ray
@imports_ray
def test_what_is_asked_for_and_what_is_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    machine = {"CPU": 3.0, "GPU": 1.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": machine}] * 2)
    free = {"CPU": 5.0, "GPU": 1.0}
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    cluster._check_room(Count(2, 2), {"num_cpus": 2.0}, before=False)  # 2 + 2 of 3 + 3
    with pytest.raises(UsageError, match=r"3 replicas .* 2 CPU; the cluster has 6 CPU, .* 5 CPU"):
        cluster._check_room(Count(3, 3), {"num_cpus": 2.0}, before=False)
    both = {"num_cpus": 1.0, "num_gpus": 1.0}
    cluster._check_room(Count(2, 4), both, before=True)  # those that run make room
    with pytest.raises(UsageError, match=r"1 CPU and 1 GPU; .* 5 CPU and 1 GPU free"):
        cluster._check_room(Count(2, 2), both, before=False)


class Command:
    """`jackfield serve demo --replicas …`, once it serves; `lines` are what it says."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "jackfield", "serve", "demo", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )  # fmt: skip
        self.lines: list[str] = []
        stderr = self.process.stderr
        assert stderr is not None
        for line in stderr:
            self.lines.append(line)
            if found := re.search(r"at (http://127\.0\.0\.1:(\d+)) ", line):
                self.url, self.port = found[1], found[2]
                self._reading = threading.Thread(target=lambda: self.lines.extend(stderr))
                self._reading.start()
                return
        self.process.wait()
        stderr.close()
        raise AssertionError("".join(self.lines))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def replicas() -> list[int]:
    """Processes of replicas."""
    return _called("ray::ServeReplica:")


def _called(title: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if title in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Command]:
    """Ended by SIGTERM, which leaves no process behind."""
    command = Command(*arguments)
    try:
        yield command
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(90) == 0, command.lines[-5:]
        assert not replicas()
    finally:
        command.close()


async def streams(url: str, count: int, **more: Any) -> Counter[str]:
    """How so many streams end: whole, or by which error, before or after it has begun."""
    ends: Counter[str] = Counter()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> None:
            begun = "not begun"
            try:
                asked = {**TELL, "prompt": f"{number}. Tell me", **more}
                async for chunk in await client.completions.create(**asked, stream=True):
                    begun = "whole" if chunk.choices[0].finish_reason else "begun"
                ends[begun] += 1
            except openai.APIError as error:
                ends[f"{begun}: {error.message}"] += 1

        async with asyncio.timeout(240):
            await asyncio.gather(*(one(number) for number in range(count)))
    return ends


LOST = "begun: the replica that made this answer was lost before its end; ask again"


async def losing_one(url: str, count: int, after: float, **more: Any) -> Counter[str]:
    """The same while a replica is killed."""

    async def kill() -> None:
        await asyncio.sleep(after)
        os.kill(replicas()[0], signal.SIGKILL)

    ends, _ = await asyncio.gather(streams(url, count, **more), kill())
    return ends


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@on_ray
@linux
def test_a_replica_is_lost_and_the_server_goes_on() -> None:
    with served("--replicas", "2", "--port", "0", "--max-batch-size", "4") as command:
        assert len(replicas()) == 2
        ends = asyncio.run(losing_one(command.url, 24, 0.5, max_tokens=60))
        assert sum(ends.values()) == 24
        assert ends.keys() <= {"whole", LOST}, ends
        assert ends["whole"] >= 12
        assert asyncio.run(streams(command.url, 4, max_tokens=4)) == {"whole": 4}


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a cluster that runs already."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    token = {**os.environ, "RAY_AUTH_MODE": "token"}
    subprocess.run([*ray, "get-auth-token", "--generate"], check=True, capture_output=True)
    subprocess.run(
        [*ray, "start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false",
         "--object-store-memory=100000000", "--disable-usage-stats"],
        check=True, capture_output=True, env=token, timeout=120,
    )  # fmt: skip
    yield f"127.0.0.1:{port}"
    subprocess.run([*ray, "stop", "--force"], check=True, capture_output=True, timeout=60)


@pytest.mark.long
@on_ray
@linux
@pytest.mark.timeout(900)
def test_on_a_cluster_that_runs(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is killed under load; then all are replaced under load, and no request fails."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    on = ["--ray-address", head]
    many = Command.__new__(Command)
    with pytest.raises(AssertionError, match="3 replicas have no place: each asks for 1 CPU"):
        many.__init__("--replicas", "3", "--port", "0", *on)  # type: ignore[misc]
    with served("--replicas", "2", "--port", "0", *on) as command:
        ends = asyncio.run(losing_one(command.url, 100, 1.0, max_tokens=100))
        assert ends["whole"] + ends[LOST] == 100, ends
        assert ends["whole"] >= 30
        assert asyncio.run(streams(command.url, 100, max_tokens=20)) == {"whole": 100}
        before = set(replicas())
        again = ["serve", "demo", "--replicas", "2", "--port", command.port, *on]
        asked, failures = _while_asking(command.url, [sys.executable, "-m", "jackfield", *again])
        assert asked > 20
        assert not failures
        assert not before & set(replicas())
        wrong = subprocess.run(
            [sys.executable, "-m", "jackfield", *again, "--allow-unauthenticated",
             "--cors-origin", "http://site"], capture_output=True, text=True,
        )  # fmt: skip
        assert wrong.returncode == 2
        assert "end it and start it anew" in wrong.stderr


def _while_asking(url: str, command: list[str]) -> tuple[int, list[str]]:
    """How many requests were asked while a command ran, and what was wrong with which."""
    done, asked, failures = threading.Event(), 0, list[str]()

    def ask() -> None:
        nonlocal asked
        with httpx.Client(timeout=120) as client:
            while not done.is_set():
                asked += 1
                body = {**TELL, "prompt": f"{asked}. Tell me", "max_tokens": 20}
                answer = client.post(f"{url}/v1/completions", json=body)
                if not answer.is_success:
                    failures.append(answer.text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert ran.returncode == 0, ran.stderr
    assert "replaced: 2 replicas" in ran.stderr
    return asked, failures
