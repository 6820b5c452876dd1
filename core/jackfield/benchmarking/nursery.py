"""A process that has imported what workers need, which takes seconds, and is forked for each.

Only where nothing but the CPU computes: what a GPU's driver has begun does not outlive a fork.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from typing import NoReturn, Self

from jackfield.errors import ExecutionError

_START = """
import json, os, sys
sys.path[:] = json.loads(os.environ.pop("JACKFIELD_BENCHMARK_PATH"))
from jackfield.benchmarking.nursery import serve
serve(int(sys.argv[1]))
"""
#: A request is the process that is asked about, 0 for a new one, with its two files; an answer is
#: its number, or how it ended.
_NUMBER = struct.Struct("!q")
_RUNS = 1 << 20  # in the place of an exit code
_ANY = -1


def usable() -> bool:
    """Whether processes can be forked here that compute."""
    import torch

    return sys.platform == "linux" and not (torch.cuda.is_available() or torch.xpu.is_available())


class Nursery:
    """The process. A context manager: leaving it ends it, and not what was forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "JACKFIELD_BENCHMARK_PATH": json.dumps(sys.path)},
            )

    def ready(self, seconds: float | None = None) -> None:
        """Wait until everything is imported. Raises TimeoutError where that takes longer."""
        self._socket.settimeout(seconds)
        self.ask(_ANY)
        self._socket.settimeout(None)

    def fork(self, wire: int, output: int) -> Forked:
        """A process that serves the socket with the file number `wire`, and writes to `output`."""
        return Forked(self, self.ask(0, wire, output))

    def ask(self, pid: int, *files: int) -> int:
        """The number of a new process, or the exit code of this one, `_RUNS` while it runs."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [_NUMBER.pack(pid)], files)
                answer = self._socket.recv(_NUMBER.size)
        except TimeoutError:
            self._socket.close()
            raise
        except OSError:
            answer = b""
        except BaseException:  # interrupted: its answer would be that of the next question
            self._socket.close()
            raise
        if len(answer) < _NUMBER.size:
            raise ExecutionError("the process that others are forked from has ended")
        return int(_NUMBER.unpack(answer)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """What `subprocess.Popen` is of a process that another one started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            try:
                found = self._nursery.ask(self.pid)
            except ExecutionError:
                found = 0  # nobody can tell any more
            if found != _RUNS:
                self.returncode = found
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode

    def kill(self) -> None:
        """End it, where it has not been waited for."""
        if self.returncode is None:
            os.kill(self.pid, 9)


def serve(number: int) -> None:
    """Import everything, then fork for whoever asks over the socket, until nobody does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads do not outlive a fork
    from jackfield.api import plan
    from jackfield.benchmarking import child as imported

    del imported
    plan("demo")  # imports what backends need to say whether they can be had
    gc.collect()
    gc.freeze()  # a collector would copy the pages of all that is imported
    with socket.socket(fileno=number) as told:
        while True:
            asked, files, *_ = socket.recv_fds(told, _NUMBER.size, 2)
            if len(asked) < _NUMBER.size:
                return
            if not files:
                told.send(_NUMBER.pack(_status(_NUMBER.unpack(asked)[0])))
            elif pid := os.fork():
                for one in files:
                    os.close(one)
                told.send(_NUMBER.pack(pid))
            else:
                told.close()
                break
    torch.set_num_threads(threads)
    _be(*files)


def _be(wire: int, output: int) -> NoReturn:
    """Become the process of a worker, which ends as Python does."""
    code: object = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        from jackfield.benchmarking import child

        child.serve(wire)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 - as Python ends
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _status(pid: int) -> int:
    if pid == _ANY:
        return _RUNS
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else _RUNS
