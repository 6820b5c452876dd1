"""The checks of compilers: right ones pass, wrong ones are caught by the fault's name."""

from __future__ import annotations

import compiler
import pytest
from wrong import Wrong, caught, is_named, judged

from jackfield.testing.checks import failures, verdict
from jackfield.testing.subject import subject_of
from jackfield.testing.suites import checks_of

SAMPLE = ("returns the step", "positions one further", "changes the ids", "fills up to nothing")


def failed(selection: str) -> list[str]:
    checks = checks_of(subject_of(selection, "compiler"))
    return [f"{v.name}: {v.message}" for v in failures(map(verdict, checks))]


def test_steps_as_they_are_pass() -> None:
    assert failed("plugin:none") == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "selection", ["inductor?backend=eager", "inductor?backend=eager&shapes=bucketed", "inductor"]
)
def test_built_in_compilers_pass(selection: str) -> None:
    assert failed(f"plugin:{selection}") == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_right_one_with_few_capabilities_passes() -> None:
    found = judged(compiler.compiler())
    assert [f"{v.name}: {v.message}" for v in failures(found)] == []


def held(wrong: Wrong) -> None:
    found = caught(wrong)
    assert is_named(wrong, found), f"{wrong}: {found}"


@pytest.mark.parametrize("wrong", [w for w in compiler.ZOO if w.name in SAMPLE], ids=str)
def test_wrong_compilers_are_caught_by_name(wrong: Wrong) -> None:
    held(wrong)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", [w for w in compiler.ZOO if w.name not in SAMPLE], ids=str)
def test_all_wrong_compilers_are_caught_by_name(wrong: Wrong) -> None:
    held(wrong)
