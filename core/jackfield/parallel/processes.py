"""The other ranks as processes that rank 0 starts by itself, where torchrun did not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from jackfield.errors import ExecutionError, UsageError, quoted

_END_WITHIN = 5.0  # seconds for a process to end when it is told to

#: What is behind the line of arguments never comes: that it ends says that rank 0 is gone.
_START = """
import json, os, sys, threading
sys.path[:], arguments = json.loads(sys.stdin.readline())
threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
import jackfield
try:
    jackfield.load(**arguments)
except jackfield.JackfieldError as error:
    sys.exit(f"error: {error}")
"""


class Processes:
    """Ranks 1 and up, each of which calls `jackfield.load` with `arguments` and follows.

    They meet at `port` of this machine. What they print comes out on standard error, behind the
    number of its rank. Raises UsageError for arguments that cannot be handed over, ExecutionError
    where one cannot be started.
    """

    def __init__(
        self, arguments: Mapping[str, Any], size: int, port: int, threads: int | None
    ) -> None:
        self.lines: dict[int, str] = {}  # the last one that each printed
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        request = _written(arguments)
        try:
            for rank in range(1, size):
                self._start(rank, _started(rank, size, port, threads))
            for process in self._started.values():
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it has ended, which is found out later
                    process.stdin.write(request)
                    process.stdin.flush()
        except OSError as error:
            self._end_all()
            raise ExecutionError(
                f"cannot start {size - 1} more processes: {error.strerror}; give a smaller tp_size"
            ) from None
        except BaseException:
            self._end_all()
            raise

    def _start(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._started[rank] = process
        assert process.stdout is not None
        reader = threading.Thread(target=self._show, args=(rank, process.stdout), daemon=True)
        reader.start()

    def _show(self, rank: int, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if text := line.decode(errors="replace").rstrip():
                    self.lines[rank] = text
                    _say(f"[rank {rank}] {text}")

    def ended(self, rank: int) -> str | None:
        """How a process has ended, in words; None: it runs."""
        process = self._started.get(rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if process is None else process.wait(0.5)
            return None if code is None else _how(code)
        return None

    def any_ended(self) -> str | None:
        """Which process has ended, and how, without waiting; None: all run."""
        for rank, process in self._started.items():
            if (code := process.poll()) is not None:
                said = f": {self.lines[rank]}" if rank in self.lines else ""
                return f"rank {rank} has ended before it joined ({_how(code)}){said}"
        return None

    def close(self) -> None:
        """Wait for those that are about to end, and end the others: at once by a Ctrl+C."""
        end = time.monotonic() + _END_WITHIN
        try:
            for process in self._started.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for process in self._started.values():
            process.kill()
        for process in self._started.values():
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # it was not told all
                    process.stdin.close()


def _say(text: str) -> None:
    """A line on standard error; where nobody reads that any more, the process goes on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _written(given: Mapping[str, Any]) -> bytes:
    arguments = {name: value for name, value in given.items() if name != "tokenizer"}
    for name, value in arguments.items():
        try:
            json.dumps(value, default=_text)
        except TypeError:
            raise UsageError(
                f"tp_size starts processes, which are told {name}={quoted(value)} as text, and it "
                "is none; start them with torchrun and write tp_plan='auto'"
            ) from None
    return json.dumps([sys.path, arguments], default=_text).encode() + b"\n"


def _text(value: object) -> str:
    """The name that stands for a path, a dtype or a device; TypeError for all else."""
    if isinstance(value, os.PathLike) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    raise TypeError(type(value))


def _started(rank: int, size: int, port: int, threads: int | None) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return subprocess.Popen(
        [sys.executable, "-c", _START],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl+C is for rank 0, which lets the others end
    )


def _how(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"with exit code {code}"
