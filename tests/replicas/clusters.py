"""Commands that run on clusters of this machine, and the processes of which they consist."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import extras
import pytest

on_ray = extras.marked("ray")
imports_ray = pytest.mark.filterwarnings("ignore")  # Ray's modules use what others gave up
#: What is in the environment of all that these tests start.
_OURS = f"CLUSTERS_OF={os.getpid()}"
os.environ.update([_OURS.split("=")])
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


class Command:
    """`jackfield serve demo --replicas …`, once it serves; `lines` are what it says."""

    def __init__(self, *arguments: str, model: str = "demo") -> None:
        command = [sys.executable, "-m", "jackfield", "serve", model, *arguments]
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
    """Processes of replicas that these tests have started, and no others'."""
    return _called("ServeReplica:")


def ranks() -> list[int]:
    """Processes of ranks that are no replica themselves."""
    return _called("ray::Rank")


def _called(title: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if title not in (process / "cmdline").read_text():
                continue
            if _OURS.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def served(*arguments: str, model: str = "demo") -> Iterator[Command]:
    """Ended by SIGTERM, which leaves no process behind."""
    command = Command(*arguments, model=model)
    try:
        yield command
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(90) == 0, command.lines[-5:]
        assert not replicas() + ranks()
    finally:
        command.close()


@contextlib.contextmanager
def cluster() -> Iterator[str]:
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
