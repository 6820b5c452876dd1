"""The project's own tests in files that ask for a GPU, in one process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucheck.metadata import ROOT
from gpucheck.results import SkippedError

if TYPE_CHECKING:
    from gpucheck.bench import Bench

#: What a test says that runs only, or otherwise, where a GPU is; the second of Triton's kernels.
ASKS = ("torch.cuda.is_available()", "interpreted()")
OWN = Path(__file__).parents[1]


def run(bench: Bench) -> None:
    run_files(bench, [str(file.relative_to(ROOT)) for file in asking(ROOT / "tests")])


def asking(folder: Path) -> list[Path]:
    """Test files that ask whether there is a GPU; the tests of this package are not among them.

    Those of kernels that are interpreted without one come last: they run everywhere, and each of
    their examples takes seconds to compile.
    """
    files = [file for file in sorted(folder.rglob("test_*.py")) if OWN not in file.parents]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    asks = [file for file in files if any(word in texts[file] for word in ASKS)]
    return sorted(asks, key=lambda file: ASKS[1] in texts[file])


def run_files(bench: Bench, files: list[str]) -> None:
    """Run them by pytest. Each failure is a result of its own, and so is each file at its end."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-s", "-p", "gpucheck.existing_tests", "-p",
        "no:cacheprovider", "-W", "default", *files,
    ]  # fmt: skip
    told = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for name, outcomes in itertools.groupby(outcomes_of(process), _file_of):
            counts: Counter[str] = Counter()
            for outcome in outcomes:
                counts[outcome["outcome"]] += 1
                if outcome["outcome"] == "failed":
                    bench.results.note(outcome["test"], False, error=outcome["error"])
            told += counts.total()
            counted = {which: counts[which] for which in ("passed", "failed", "skipped")}
            bench.results.note(name, not counts["failed"], **counted)
    if not told:
        raise SkippedError("pytest ran no test; its words are in the log of the stage")


def outcomes_of(process: subprocess.Popen[str]) -> Iterator[dict[str, str]]:
    """What the plugin below prints, as it comes; the rest goes into the log of the stage."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_MARK):
            yield json.loads(line[len(_MARK) :])
        else:
            sys.stderr.write(line)


def _file_of(outcome: dict[str, str]) -> str:
    return outcome["test"].partition("::")[0]


_MARK = "gpucheck-outcome "


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest: this module is its own plugin in the process that runs the tests."""
    if report.when == "call" or report.outcome != "passed":
        error = str(report.longrepr).strip().splitlines()[-1:] if report.failed else []
        told = {"test": report.nodeid, "outcome": report.outcome, "error": "".join(error)}
        print(f"\n{_MARK}{json.dumps(told)}", flush=True)
