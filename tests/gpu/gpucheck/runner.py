"""Runs the stages one after the other, each in a process of its own that ends at its limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucheck.metadata import PATHS, ROOT, write_metadata
from gpucheck.results import LOST, Values, appending, read
from gpucheck.stages import STAGES, Stage

LINES, RESULT = "results.jsonl", "gpu.json"
NOW = "now"  # the check that is being made
LAST_WORDS = 2.0  # seconds before its limit at which a stage writes down where it is
Command = Callable[[Stage], Sequence[str]]


def stage_command(folder: Path, device: str, sizes: str) -> Command:
    """How a stage is started."""

    def command(stage: Stage) -> list[str]:
        own = ["--out", str(folder), "--device", device, "--sizes", sizes]
        return [sys.executable, "-m", "gpucheck", "--stage", stage.name, *own]

    return command


def run_stages(
    folder: Path, command: Command, stages: Iterable[Stage] = STAGES, end: float = math.inf
) -> bool:
    """Run all; whether every check that was made was right, and no stage was cut or crashed.

    What is known so far is in `folder` at any time: a line for each result, and after each stage
    one JSON of all. At `end` on the monotonic clock all is over, as where a machine is lent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / LINES
    lines.unlink(missing_ok=True)
    ended: list[Values] = []
    environ = environment(folder)
    due = time.monotonic()  # when a stage would end if all took as long as they may
    for planned in stages:
        due += planned.limit
        now = time.monotonic()
        # What those before it have left is its own too.
        limit = min(max(planned.limit, due - now), end - now)
        stage = replace(planned, limit=max(1, int(limit)))
        print(f"{stage.name} (at most {stage.limit} s): {stage.what}", flush=True)
        ended.append(run_on(stage, command(stage), folder, environ))
        print(f"  {stage.name} {ended[-1]['ended']} after {ended[-1]['seconds']:.0f} s", flush=True)
        write_result(folder, ended)
    found = read(lines)
    wrong = sum(record["ok"] is False for record in found)
    uncut = all(stage["ended"] == "whole" for stage in ended)
    print(f"{len(found)} results, {wrong} wrong; all of it is in {folder / RESULT}")
    return uncut and not wrong


def run_on(stage: Stage, command: Sequence[str], folder: Path, environ: dict[str, str]) -> Values:
    """Run one stage to its end or to its limit, past checks that end its process or lose its GPU.

    The first checks of such a stage are not made again (`Results.made`).
    """
    (folder / f"{stage.name}.log").unlink(missing_ok=True)
    begin, starts = time.monotonic(), 0
    while True:
        before = made_by(stage.name, folder)
        (folder / NOW).unlink(missing_ok=True)
        left = stage.limit - (time.monotonic() - begin)
        told = run_one(stage, command, folder, environ, max(1.0, left))
        starts += 1
        if not goes_on(stage.name, folder, told, before):
            break
    told["seconds"] = round(time.monotonic() - begin, 1)
    return told if starts == 1 else {**told, "starts": starts}


def made_by(stage: str, folder: Path) -> set[str]:
    """The checks of a stage that have a result."""
    return {record["check"] for record in read(folder / LINES) if record["stage"] == stage}


def goes_on(stage: str, folder: Path, told: Values, before: set[str]) -> bool:
    """Whether another process may come further; the check in which one has ended is wrong."""
    if told["ended"] == "whole" or "was cut" in told["ended"]:
        return False
    now, made = folder / NOW, made_by(stage, folder)
    if told["ended"] == f"ended with exit status {LOST}":
        return made != before
    name = now.read_text() if now.exists() else None
    if name is None or name in made:
        return False
    wrong = {"error": f"its process {told['ended']}", "where": told["log"][-12:]}
    appending(folder / LINES)({"stage": stage, "check": name, "ok": False, **wrong})
    return True


def run_one(
    stage: Stage, command: Sequence[str], folder: Path, environ: dict[str, str], limit: float
) -> Values:
    """Run a process of a stage to its end, or for `limit` seconds."""
    log = folder / f"{stage.name}.log"
    started = time.monotonic()
    own = {**environ, "GPUCHECK_LAST_WORDS": str(max(1.0, limit - LAST_WORDS))}
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stderr=errors, cwd=ROOT, env=own, start_new_session=True
        )
        try:
            code = process.wait(limit)
            ended = "whole" if code == 0 else f"ended with exit status {code}"
            # To write down where it is can kill a process that torch traces.
            if code == -signal.SIGSEGV and time.monotonic() - started > limit - LAST_WORDS:
                ended = f"was cut at its limit of {stage.limit} s"
        except subprocess.TimeoutExpired:
            ended = f"was cut at its limit of {stage.limit} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started is in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told: Values = {
        "stage": stage.name, "ended": ended, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    if ended != "whole":
        told["log"] = log.read_text(errors="replace").splitlines()[-30:]
    return told


def environment(folder: Path) -> dict[str, str]:
    """With the checkout on the path, and jackfield's metadata where it is not installed."""
    paths = list(PATHS)
    if not installed():
        write_metadata(folder / "metadata")
        paths.append(str(folder / "metadata"))
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def installed() -> bool:
    """Whether this Python has jackfield's metadata, so that its plugins are found."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("jackfield"))
    return False


def write_result(folder: Path, ended: list[Values]) -> None:
    """One JSON of all that is known, in the place of the one before."""
    found = read(folder / LINES)
    whole: dict[str, Any] = {
        "gpu": next((r["name"] for r in found if r["check"] == "gpu" and "name" in r), None),
        "date": time.strftime("%Y-%m-%d"),
        "stages": ended,
        "results": found,
    }
    fresh = folder / f"{RESULT}.new"
    fresh.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(folder / RESULT)


def listed(reason: str) -> str:
    """What would run, where nothing can."""
    total = sum(stage.limit for stage in STAGES)
    lines = [f"{reason}, so nothing was run. `make gpu` runs, in at most {total} s:"]
    lines += [f"  {stage.name:10} {stage.limit:4} s  {stage.what}" for stage in STAGES]
    return "\n".join(lines)
