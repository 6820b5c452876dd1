"""Processes that begin with torch imported, which takes seconds: forks of one that did only that.

`Forks.run` stands in for `subprocess.run([python, …])` where it matters that a process of its own
may crash, exit or hang, and not how it began. Run as a program, this is the process that is forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What a fresh interpreter has on its path, behind PYTHONPATH; the first is this file's folder.
USUAL = sys.path[1:]


class Forks:
    """The process, begun when it is first needed, with `env`; it imports `modules`, as far as they
    are there.
    """

    def __init__(self, *modules: str, env: dict[str, str] | None = None) -> None:
        self._modules, self._env = modules, env
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        timeout: float,
        input: str = "",  # noqa: A002 - as subprocess.run has it
        **_: Any,
    ) -> subprocess.CompletedProcess[bytes]:
        """`command` is a Python's, with `-m module`, `-c code` or a file; raises TimeoutExpired."""
        with tempfile.TemporaryDirectory() as folder:
            told, out, err = (Path(folder, name) for name in ("told", "out", "err"))
            told.write_text(input)
            given = [command[1:], env, os.getcwd(), *map(str, (told, out, err)), timeout]
            ended = self._ask(given)
            if ended == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(command, timeout)
            return subprocess.CompletedProcess(command, ended, out.read_bytes(), err.read_bytes())

    def python(
        self, *arguments: str | Path, env: Mapping[str, str] = os.environ, timeout: float = 250
    ) -> subprocess.CompletedProcess[str]:
        """What an interpreter says that is given these `arguments`, in text."""
        command = [sys.executable, *map(str, arguments)]
        done = self.run(command, env=dict(env), timeout=timeout)
        said = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(command, done.returncode, *said)

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()

    def _ask(self, given: list[Any]) -> int:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                env=self._env,
            )  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(given) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def serve() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collector would copy the pages of all that is imported

    for line in sys.stdin:
        given = json.loads(line)
        if (child := os.fork()) == 0:
            be(*given)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def be(command: list[str], env: dict[str, str], folder: str, *rest: Any) -> None:
    """Become the process that `command` asks for; never returns.

    `rest` is the files of its input, output and errors, and its time in seconds.
    """
    *streams, timeout = rest
    code: Any = 0
    signal.setitimer(signal.ITIMER_REAL, timeout)  # which ends it
    try:
        written = os.O_CREAT | os.O_WRONLY
        for number, name in enumerate(streams):
            os.dup2(os.open(name, written if number else os.O_RDONLY), number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        before = env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*before, *(entry for entry in USUAL if entry not in before)]
        begin(*command)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ended.code is not None
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001 - as Python ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def begin(first: str, *rest: str) -> None:
    """As `python first rest…` begins, in this process."""
    if first == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102 - a test's own
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve()
