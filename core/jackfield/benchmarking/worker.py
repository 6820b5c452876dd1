"""A contender in a process of its own: told over a socket what to do, and waiting in between.

A crash, a hang, a peak of memory and a fragmented heap are then its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import IO, Any, Self

from jackfield import errors
from jackfield.benchmarking.nursery import Forked, Nursery
from jackfield.errors import ExecutionError, JackfieldError, UsageError, shown
from jackfield.parallel.wire import Wire

#: Seconds to import torch, load a model and compile; and for anything else.
LOADING, ROUND = 1800.0, 600.0

_START = """
import json, os, sys
sys.path[:] = json.loads(os.environ.pop("JACKFIELD_BENCHMARK_PATH"))
from jackfield.benchmarking.child import serve
serve(int(sys.argv[1]))
"""


Process = subprocess.Popen[bytes] | Forked


class Worker:
    """The process of one contender. A context manager: leaving it ends the process.

    It is forked in the `nursery`; None: it begins from nothing.
    """

    def __init__(self, nursery: Nursery | None = None) -> None:
        self._closed = False
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile(prefix="jackfield-bench-")  # noqa: SIM115
        with theirs, contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            failing.callback(self._output.close)
            files = theirs.fileno(), self._output.fileno()
            self._process: Process = (
                _begun(files[0], self._output) if nursery is None else nursery.fork(*files)
            )
            failing.pop_all()
        self._wire = Wire(ours)

    def ask(self, what: str, seconds: float = ROUND, **given: Any) -> Any:
        """What the process answers. Raises the error that it ended with, or ExecutionError.

        After an ExecutionError the process is gone.
        """
        try:
            self._wire.send({"do": what, **given})
            answer = self._wire.receive(seconds)
        except TypeError as error:
            raise UsageError(f"a process of its own can be given names only: {error}") from None
        except TimeoutError:
            self.close()
            raise ExecutionError(f"it did not end within {round(seconds, 2):g} s") from None
        except (OSError, EOFError, ValueError):
            raise ExecutionError(self._ended()) from None
        except BaseException:  # interrupted: its answer would be that of the next question
            self.close()
            raise
        if "error" in answer:
            raise _error(answer)
        return answer["found"]

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.close()
        code = self._process.returncode or 0
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"exit code {code}"
        self._output.seek(0)
        said = " ".join(self._output.read().decode(errors="replace").split())[-300:]
        return f"its process ended with {how}{f': {shown(said, 300)}' if said else ''}"

    def close(self) -> None:
        """End the process, whatever it does, and what it started."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._wire.close()
        self._output.close()


def _begun(wire: int, output: IO[bytes]) -> Process:
    return subprocess.Popen(
        [sys.executable, "-c", _START, str(wire)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(wire,),
        start_new_session=True,
        env={**os.environ, "JACKFIELD_BENCHMARK_PATH": json.dumps(sys.path)},
    )


def _error(answer: dict[str, str]) -> JackfieldError:
    """The error of our tree that the process raised, or an ExecutionError for another one."""
    kind = getattr(errors, answer["error"], None)
    known = isinstance(kind, type) and issubclass(kind, JackfieldError)
    found: JackfieldError = (kind if known else ExecutionError)(answer["message"])  # type: ignore[misc]
    return found
