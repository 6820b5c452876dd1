"""The kit itself: subjects, verdicts, and what breaks the process that checks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from jackfield.errors import SelectionError
from jackfield.testing.checks import Check, NotTriedError, WrongError, verdict
from jackfield.testing.subject import subject_of


def test_the_smallest_case_that_fails_is_told() -> None:
    def run(case: int) -> str:
        if case > 2:
            raise WrongError(f"{case} is too much")
        return "fine"

    found = verdict(Check("a", "b", run, cases=(1, 2, 3, 4)))
    assert (found.outcome, found.message, found.case) == ("failed", "3 is too much", "3")
    assert verdict(Check("a", "b", run, cases=(1, 2))).message == "fine"
    assert verdict(Check("a", "b", run, cases=(1,), refusal=True)).outcome == "refused"


def test_errors_nobody_expected_fail_with_their_trace() -> None:
    def broken(_: object) -> str:
        raise KeyError("gone")

    def elsewhere(_: object) -> str:
        raise NotTriedError("needs a GPU")

    found = verdict(Check("a", "b", broken))
    assert found.outcome == "failed"
    assert "KeyError" in found.message
    assert "broken" in found.trace
    assert verdict(Check("a", "b", elsewhere)).outcome == "not tried"


def test_a_name_of_several_kinds_wants_its_kind() -> None:
    with pytest.raises(SelectionError, match=r"--kind compiler or --kind quantizer"):
        subject_of("plugin:none")
    assert subject_of("plugin:none", "compiler").kind == "compiler"
    with pytest.raises(SelectionError, match=r"offers a backend 'sdpaa'.*did you mean"):
        subject_of("plugin:sdpaa")
    with pytest.raises(SelectionError, match="there is no kind 'tension'"):
        subject_of("plugin:sdpa", "tension")


def test_files_of_checks_are_in_a_temporary_folder(tmp_path: Path) -> None:
    subject = subject_of("plugin:fifo")
    assert subject.folder.is_relative_to(tempfile.gettempdir())
    assert subject.folder != subject_of("plugin:fifo").folder
    assert [*subject.folder.iterdir()] == []
    assert subject_of("plugin:fifo", folder=tmp_path).folder == tmp_path
