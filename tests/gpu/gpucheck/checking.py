"""`jackfield check` over the backends that are for a GPU, in one process."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.testing.checks import verdict
from jackfield.testing.subject import subject_of
from jackfield.testing.suites import checks_of

if TYPE_CHECKING:
    from gpucheck.bench import Bench
    from gpucheck.results import Values

#: What is checked on a GPU, the most important first; and what stands in for it on a processor.
ON_A_GPU = (
    ("attention", "triton"),
    ("kernel", "triton-one-row"),
    ("kernel", "triton-rms-norm"),
    ("kernel", "triton-rotary"),
    ("attention", "sdpa"),
    ("cache", "paged"),
    ("compiler", "cuda_graph"),
    ("attention", "flash_attention_2"),
    ("attention", "flash_attention_3"),
)
ON_A_PROCESSOR = (("kernel", "cpu-rms-norm"),)


def run(bench: Bench) -> None:
    backends = ON_A_GPU if bench.device.name.startswith("cuda") else ON_A_PROCESSOR
    for kind, name in backends:
        with tempfile.TemporaryDirectory() as folder:
            bench.results.run(f"{kind} {name}", check_backend, bench, kind, name, Path(folder))


def check_backend(bench: Bench, kind: str, name: str, folder: Path) -> Values:
    """Each failure is a result of its own, and so is each backend at its end."""
    subject = subject_of(name, kind, folder, device=bench.device.name)
    counts: Counter[str] = Counter()
    for check in checks_of(subject):
        found = verdict(check)
        counts[found.outcome] += 1
        if found.outcome == "failed":
            told = {"error": found.message, "case": found.case}
            bench.results.note(f"{kind} {name}: {found.name}", False, **told)
    return {"ok": not counts["failed"], **counts}
