"""``pytest --jackfield-bench plugin:NAME``: pytest-benchmark is told of what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import SLOW

pytest_plugins = "pytester"

ALONE = ("-p", "no:randomly", "--jackfield-bench", "plugin:sdpa")
CONFTEST = """
import sys
sys.path.insert(0, {here!r})
from made_runs import FAST, SLOW, row, run
from jackfield.testing import benchmark_items
found = run(row("auto", FAST), row("plugin:sdpa", SLOW, reasons={reasons!r}))
benchmark_items._beside_auto = lambda selection: found
"""

Pytest = Callable[..., pytest.RunResult]


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Pytest:
    """pytest in a process of its own: within this one it would forget what it imports."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # where nothing is shown or saved
    return pytester.runpytest_subprocess


def measured(pytester: pytest.Pytester, reasons: tuple[str, ...] = ()) -> None:
    """What is measured of a backend is what a test says."""
    pytester.makeconftest(CONFTEST.format(here=str(Path(__file__).parent), reasons=reasons))


def saved(pytester: pytest.Pytester) -> Any:
    (found,) = json.loads((pytester.path / "found.json").read_text())["benchmarks"]
    return found


def test_rounds_are_a_benchmark_like_any_other(
    pytester: pytest.Pytester, run_pytest: Pytest
) -> None:
    measured(pytester)
    result = run_pytest(*ALONE, "--benchmark-json=found.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*jackfield bench plugin:sdpa*"])
    found = saved(pytester)
    assert found["stats"]["data"] == pytest.approx(SLOW)
    assert found["extra_info"]["beside_auto"]["verdict"] == "slower"
    assert found["extra_info"]["tokens_per_second"] == pytest.approx(10 / 0.13715)


def test_what_is_no_result_fails(pytester: pytest.Pytester, run_pytest: Pytest) -> None:
    measured(pytester, reasons=("wrong tokens in 2 of 2 texts",))
    result = run_pytest(*ALONE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*plugin:sdpa is no result: wrong tokens in 2 of 2 texts*"])


def test_a_backend_that_is_not_there(run_pytest: Pytest) -> None:
    result = run_pytest("-p", "no:randomly", "--jackfield-bench", "plugin:sdpaa")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cannot measure plugin:sdpaa: no installed plugin offers*"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.long
def test_a_backend_of_ours_is_measured(pytester: pytest.Pytester, run_pytest: Pytest) -> None:
    run_pytest(*ALONE, "--benchmark-json=found.json").assert_outcomes(passed=1)
    assert saved(pytester)["stats"]["rounds"] == 15
