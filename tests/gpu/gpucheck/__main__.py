"""`python -m gpucheck`: run all stages, list them, or write the page of a result."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpucheck import page
from gpucheck.metadata import ROOT
from gpucheck.results import Results, appending
from gpucheck.runner import LINES, NOW, listed, made_by, run_stages, stage_command
from gpucheck.stages import STAGES

BEGAN = time.monotonic()  # from a fresh disk torch takes its time to be imported
MOST = 590.0  # seconds for all, of ten minutes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpucheck", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where results go")
    parser.add_argument("--list", action="store_true", help="list the stages and run none")
    parser.add_argument("--only", nargs="+", choices=[s.name for s in STAGES], help="these stages")
    parser.add_argument("--page", type=Path, help="write docs/gpu.md from this result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", choices=("gpu", "tiny"), default="gpu")
    parser.add_argument("--stage", choices=[s.name for s in STAGES], help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.page:
        return page.write(asked.page)
    if asked.stage:
        return run_here(asked.stage, asked.out, asked.device, asked.sizes)
    reason = "asked for the list" if asked.list else unable(asked.device)
    if reason:
        print(listed(reason))
        return 0
    stages = [stage for stage in STAGES if not asked.only or stage.name in asked.only]
    if asked.device == "cpu":  # which shows that all of it runs, however loaded the machine is
        stages = [replace(stage, limit=10 * stage.limit) for stage in stages]
    out = asked.out.absolute()
    command = stage_command(out, asked.device, asked.sizes)
    end = math.inf if asked.device == "cpu" else BEGAN + MOST
    return 0 if run_stages(out, command, stages, end) else 1


def unable(device: str) -> str:
    """Why nothing can run here; empty where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    return "" if device == "cpu" or torch.cuda.is_available() else "torch sees no CUDA GPU"


def run_here(name: str, folder: Path, device: str, sizes: str) -> int:
    """One stage in this process."""
    if last_words := os.environ.get("GPUCHECK_LAST_WORDS"):
        faulthandler.dump_traceback_later(float(last_words))
    faulthandler.enable()
    from gpucheck.bench import Bench, Gpu, Host
    from gpucheck.sizes import GPU, TINY

    (stage,) = (stage for stage in STAGES if stage.name == name)
    where = Host() if device == "cpu" else Gpu(device)
    results = Results(
        name,
        appending(folder / LINES),
        made=made_by(name, folder),
        begin=(folder / NOW).write_text,
        lost=where.lost,
    )
    bench = Bench(where, TINY if sizes == "tiny" else GPU, results)
    with results.check("the stage itself"):
        importlib.import_module(f"gpucheck.{stage.module}").run(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
