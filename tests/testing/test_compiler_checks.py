"""The checks of compilers: right ones pass, wrong ones are caught by the fault's name."""

from __future__ import annotations

import compiler
import pytest
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield.testing.checks import Verdict, verdict
from jackfield.testing.subject import subject_of
from jackfield.testing.suites import checks_of

SAMPLE = (
    "returns the step", "positions one further", "changes the ids", "fills up to nothing",
    "returns float16", "positions up to 63",
)  # fmt: skip


def found_of(selection: str) -> list[Verdict]:
    return list(map(verdict, checks_of(subject_of(selection, "compiler"))))


def test_steps_as_they_are_pass() -> None:
    assert_right(found_of("plugin:none"), 15)


def test_native_steps_follow_the_weights() -> None:
    (check,) = (
        one
        for one in checks_of(subject_of("plugin:native", "compiler"))
        if one.name == "step.weights"
    )
    assert_right([verdict(check)], 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "selection",
    ["inductor?backend=eager", "inductor?backend=eager&shapes=bucketed", "inductor", "native"],
)
def test_built_in_compilers_pass(selection: str) -> None:
    assert_right(found_of(f"plugin:{selection}"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_right_one_with_few_capabilities_passes() -> None:
    found = judged(compiler.compiler())
    assert_right(found)


@pytest.mark.parametrize("wrong", sampled(compiler.ZOO, SAMPLE), ids=str)
def test_wrong_compilers_are_caught_by_name(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", [w for w in compiler.ZOO if w.name not in SAMPLE], ids=str)
def test_all_wrong_compilers_are_caught_by_name(wrong: Wrong) -> None:
    assert_caught(wrong)
