"""The kit itself: subjects, verdicts, and what breaks the process that checks."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs

from jackfield.errors import ExecutionError, SelectionError
from jackfield.testing.checks import Check, NotTriedError, Verdict, WrongError, verdict
from jackfield.testing.memory import CALLS, growth, new_tensors
from jackfield.testing.subject import subject_of, uninstalled
from jackfield.testing.suites import checks_of
from jackfield_plugins.attention.sdpa import SdpaAttention


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


def normalized() -> torch.Tensor:
    """What Triton's interpreter makes of ones, by a kernel that is imported only now."""
    from jackfield_plugins.kernel.triton_rms_norm.kernels import rms_norm_kernel

    rows, out = torch.ones(2, 8), torch.zeros(2, 8)
    rms_norm_kernel[(2,)](
        rows, torch.ones(8), out, 0.0, 8, 0.0, ROUNDS_FIRST=False, BLOCK=8, EARLY=False
    )
    return out


def in_a_thread() -> None:
    """As an engine does it, which says in its own words that a step failed."""
    failed: list[Exception] = []

    def step() -> None:
        try:
            normalized()
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    if failed:
        raise ExecutionError("a step failed") from failed[0]


def in_silence() -> str:
    """Falls back to something else."""
    try:
        normalized()
    except Exception:  # noqa: BLE001
        return "fine"
    return "interpreted"


def leaks() -> None:
    raise WrongError("all of it stays")


class Stranger(SdpaAttention):
    """Has no kernel; other modules of its package have."""

    name = "stranger"
    __module__ = "jackfield_plugins.stranger"


def large(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """The verdict of a large check that does no more than `run`."""
    monkeypatch.setattr("jackfield.testing.everyone.running._memory", lambda *_: run())
    with uninstalled(Stranger()) as subject:
        every = checks_of(subject)
        return verdict(next(check for check in every if check.name == "running.memory"))


@pytest.mark.parametrize("run", [normalized, in_a_thread, in_silence])
def test_what_is_large_is_left_to_a_gpu_where_triton_is_interpreted(
    run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("triton")
    found = large(run, monkeypatch)
    assert (found.outcome, "interpreter" in found.message) == ("not tried", True), found
    assert normalized().sum() == 16  # it runs again


@pytest.mark.parametrize(
    ("run", "outcome", "message"),
    [(lambda: "ran", "passed", "ran"), (leaks, "failed", "all of it stays")],
)
def test_what_runs_no_kernel_is_tried_whatever_is_installed_beside_it(
    run: Callable[[], Any], outcome: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("triton")
    assert normalized().sum() == 16
    found = large(run, monkeypatch)
    assert (found.outcome, found.message) == (outcome, message)


@pytest.mark.parametrize("interpret", [None, "0"])
def test_large_checks_run_where_nothing_is_interpreted(
    interpret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert large(lambda: "ran", monkeypatch).message == "ran"


def test_a_backend_of_kernels_says_of_each_large_check_that_it_was_not_tried() -> None:
    needs("triton")
    checks = checks_of(subject_of("plugin:triton", "attention"))
    found = [verdict(check) for check in checks if check.large]
    assert len(found) > 5
    assert {one.outcome for one in found} == {"not tried"}
    assert all("interpreter" in one.message for one in found)


@pytest.mark.parametrize("block", [1, 16, 64])
def test_memory_grows_by_what_is_kept_in_blocks_of_requests(block: int) -> None:
    numbers, kept = itertools.count(), []

    def requests() -> None:
        begun = [number for number in itertools.islice(numbers, 15) if number % block == 0]
        kept.extend(bytearray(block * 3000) for _ in begun)

    assert 2000 < growth(requests, 2000 * 15) / 15 < 4500


@pytest.mark.parametrize("when", range(CALLS - 5))
@pytest.mark.one_in(4)
def test_what_is_filled_once_is_no_growth(when: int) -> None:
    numbers, kept = itertools.count(), []

    def act() -> None:
        if next(numbers) == when:
            kept.append(bytearray(1_000_000))

    assert growth(act, 1000) <= 1000


def test_new_tensors_are_those_with_memory_that_was_not_there() -> None:
    old = torch.zeros(1000)
    with new_tensors() as new:
        view, fresh = old[10:], torch.zeros(7)
        found = new()
        assert [tensor is fresh for tensor in found if tensor.shape == (7,)] == [True]
        assert not any(tensor is view or tensor is old for tensor in found)
        del found, fresh
        assert not any(tensor.shape == (7,) for tensor in new())
