"""Checks run in a process of their own, which may crash or hang: the next goes on behind it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jackfield.errors import JackfieldError, PluginError, shown
from jackfield.testing.checks import Check, Verdict, not_there, verdict

#: Seconds to start, to import torch and the plugin, and to find the checks, on a busy machine.
START = 180.0


@dataclass(frozen=True)
class Job:
    """What is to be checked; texts and numbers only, for another process.

    `only` are patterns as of a shell; a check runs where its name fits one. `limit` is a factor on
    the time that checks may take.
    """

    selection: str
    kind: str | None = None
    only: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    limit: float = 1.0


def run(job: Job, tell: Callable[[Verdict], None] = lambda _: None) -> list[Verdict]:
    """The verdict of each check of `job`, in order; `tell` is called with each as it comes.

    Raises PluginError where the plugin cannot be loaded in the other process, or has no checks.
    """
    verdicts: list[Verdict] = []
    while (rest := _run_some(job, verdicts, tell)) is not None:
        verdicts.append(rest)
        tell(rest)
    return verdicts


def _run_some(job: Job, verdicts: list[Verdict], tell: Callable[[Verdict], None]) -> Verdict | None:
    """Run what has no verdict yet. None: all have one; otherwise that of the one that broke."""
    done = [one.name for one in verdicts]
    with tempfile.TemporaryDirectory(prefix="jackfield-check-") as folder:
        with _child(job, done, Path(folder)) as (process, lines):
            current: dict[str, Any] | None = None
            for line in lines:
                if line is None:  # too late
                    if current is None:
                        raise PluginError(f"{job.selection!r} said nothing for {START:g} s")
                    limit = current["limit"] * job.limit
                    return _lost(current, f"did not end within {limit:g} s")
                if "error" in line:
                    raise PluginError(line["error"])
                if "verdict" in line:
                    verdicts.append(Verdict(**line["verdict"]))
                    tell(verdicts[-1])
                    current = None
                elif "check" in line:
                    current = line
            code = process.wait()
        output = (Path(folder) / "output").read_bytes().decode(errors="replace")
    if current is not None:
        return _lost(current, f"ended the process: {_how(code)}")
    if code:
        last = shown(" ".join(output.split())[-300:])
        raise PluginError(f"{job.selection!r} cannot be checked: {_how(code)}; {last}")
    return None


def _lost(line: dict[str, Any], why: str) -> Verdict:
    check = Check(line["check"], line["capability"], lambda _: None)
    return replace(not_there(check, why), case=line.get("case", ""))


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


@contextlib.contextmanager
def _child(
    job: Job, done: list[str], folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[dict[str, Any] | None]]]:
    asked = {"job": vars(job), "done": done, "folder": str(folder), "path": sys.path}
    (folder / "request.json").write_text(json.dumps(asked))
    read, write = os.pipe()
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jackfield.testing.process", str(folder), str(write)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # small models: threads wait for others
        )
    os.close(write)
    try:
        yield process, _lines(read, job.limit)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        os.close(read)


def _lines(read: int, factor: float) -> Iterator[dict[str, Any] | None]:
    """What the process says, until it has ended; None where it is late."""
    waiting = selectors.DefaultSelector()
    waiting.register(read, selectors.EVENT_READ)
    buffer, until = b"", time.monotonic() + START
    while True:
        if not waiting.select(max(0.0, until - time.monotonic())):
            yield None
            return
        if not (piece := os.read(read, 1 << 16)):
            return
        *whole, buffer = (buffer + piece).split(b"\n")
        for text in whole:
            line: dict[str, Any] = json.loads(text)
            until = time.monotonic() + float(line.get("limit", START)) * factor
            yield line


def _main(folder: Path, write: int) -> None:
    request = json.loads((folder / "request.json").read_text())
    sys.path[:] = request["path"]
    from jackfield.testing.subject import subject_of
    from jackfield.testing.suites import checks_of

    given = request["job"]
    files = folder / "files"
    files.mkdir()
    with os.fdopen(write, "w") as out:
        try:
            subject = subject_of(
                given["selection"], given["kind"], files, given["seed"], given["device"]
            )
            checks = checks_of(subject)
        except JackfieldError as error:
            print(json.dumps({"error": str(error)}), file=out, flush=True)
            os._exit(0)
        for check in chosen(checks, given["only"]):
            if check.name in request["done"]:
                continue
            line = {"check": check.name, "capability": check.capability, "limit": check.limit}
            print(json.dumps(line), file=out, flush=True)
            print(json.dumps({"verdict": verdict(check).to_dict()}), file=out, flush=True)
        out.flush()
        os._exit(0)  # threads that a plugin left behind must not hold it


def chosen(checks: list[Check], only: list[str] | tuple[str, ...]) -> list[Check]:
    """Those whose names fit one of the patterns; all where there is none."""
    return [c for c in checks if not only or any(fnmatchcase(c.name, p) for p in only)]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
