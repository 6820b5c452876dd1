"""How many rounds `jackfield bench` needs on a noisy machine to find a planted slowdown of a tenth.

    python tests/benchmarks/verdicts_against_noise.py [--burn 1] [--rounds 300] [--runs 0]

Three rows of the demo model: sdpa, sdpa again, and an attention that takes 10 % longer for
everything (it computes nothing useful for a tenth of the time since it was last called). Beside
them run `--burn` processes that only burn a core. One long run is cut into pieces of 6, 10, 15, …
rounds that follow one another, and each piece is judged; with `--runs K` there are K whole runs of
`--rounds` each instead. Printed: of how many the slowdown was found, and sdpa called unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jackfield.benchmarking.contenders import Contender
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.results import Benchmark
from jackfield.benchmarking.running import bench
from jackfield.benchmarking.verdicts import paired
from jackfield.benchmarking.workload import Shape, preset

SLOWER = """
import time
from dataclasses import replace
import torch
from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

PAUSE = 0.03  # seconds: a step takes less

class Slower(Attention):
    name = "slower"
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}), features=frozenset({"grouped_query"})
    )
    def bind(self, context):
        sdpa = registry().find("attention", parse("jackfield/sdpa")).backend
        bound = sdpa.bind(replace(context, options=sdpa.options()))
        last = time.perf_counter()
        def forward(*args, **kwargs):
            nonlocal last
            found = bound.forward(*args, **kwargs)
            now = time.perf_counter()
            if now - last < PAUSE:
                ends = now + (now - last) / 10
                while time.perf_counter() < ends:
                    torch.zeros(64)
            last = time.perf_counter()
            return found
        return replace(bound, forward=forward)

@hookimpl
def jackfield_attention():
    return [Slower()]
"""

PIECES = (6, 8, 10, 15, 20, 30, 40, 60, 80, 100)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "outside_slower.py").write_text(SLOWER)
        info = folder / "slower-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slower\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[jackfield]\nslower = outside_slower\n")
        sys.path.insert(0, name)
        yield


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in burners:
            one.kill()
            one.wait()


def measured(rounds: int) -> Benchmark:
    common = {"model": "demo", "dtype": "float32", "cache_implementation": "dynamic"}
    rows = [
        Contender("sdpa", {**common, "attn_implementation": "sdpa"}),
        Contender("again", {**common, "attn_implementation": "sdpa"}),
        Contender("slower", {**common, "attn_implementation": "slower"}),
    ]
    shape = Shape(requests=4, prompt_tokens=32, new_tokens=32)
    found = bench(rows, preset("chat", shape, *reader(rows[0])), rounds=rounds)
    for row in found.rows:
        print(f"{row.label}: {row.seconds * 1e3:.0f} ms {row.spread} {row.reasons}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--burn", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--runs", type=int, default=0)
    given = parser.parse_args()
    with installed(), burning(given.burn):
        if given.runs:
            for number in range(given.runs):
                found = measured(given.rounds)
                told = {row.label: found.change(row) for row in found.rows[1:]}
                print(number, {k: (str(c.verdict), c) for k, c in told.items() if c}, flush=True)
            return
        found = measured(given.rounds)
    base = found["sdpa"].times
    for label in ("again", "slower"):
        other = found[label].times
        for size in PIECES:
            starts = range(0, len(base) - size + 1, max(1, size // 3))
            counts = Counter(
                str(paired(base[at : at + size], other[at : at + size]).verdict) for at in starts
            )
            total = counts.total()
            told = ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items())
            print(f"{label}, {size} rounds ({total} pieces): {told}")


if __name__ == "__main__":
    main()
