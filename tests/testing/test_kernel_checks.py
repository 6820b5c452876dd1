"""The checks of kernels: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
from kernel import ZOO, of
from right_kernel import Right
from wrong import Wrong, caught, is_named, judged

from jackfield.testing.checks import failures
from jackfield_plugins.kernel.cpu_rms_norm import CpuRmsNorm

SAMPLE = (
    "no weight", "a sum for a mean", "columns beyond 128 forgotten", "strides ignored",
    "into its input", "a copy of the weight",
)  # fmt: skip


def test_a_right_one_of_few_dtypes_passes() -> None:
    found = judged(of(dtypes=frozenset({"float32"})))
    assert [(one.name, one.message) for one in failures(found)] == []
    assert {"refusal.float64", "refusal.batch_invariant"} <= {
        one.name for one in found if one.outcome == "refused"
    }


def test_one_that_fits_no_layer_here_is_not_tried() -> None:
    found = judged(of(has={"fits": lambda self, module, options: False}))
    untried = [one.name for one in found if one.outcome == "not tried"]
    assert [name for name in untried if not name.startswith(("everyone.", "running."))] == [
        "layers"
    ]


@pytest.mark.long
@pytest.mark.parametrize("backend", [Right, CpuRmsNorm], ids=["right", "cpu-rms-norm"])
def test_right_ones_pass(backend: Any) -> None:
    assert [(one.name, one.message) for one in failures(judged(backend))] == []


def assert_caught(wrong: Wrong) -> None:
    found = caught(wrong)
    assert found is not None, f"{wrong} was not caught"
    assert is_named(wrong, found), found


@pytest.mark.parametrize("wrong", [w for w in ZOO if w.name in SAMPLE], ids=str)
def test_a_wrong_kernel_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


def test_names_are_unique_and_the_sample_is_there() -> None:
    names = [wrong.name for wrong in ZOO]
    assert len(set(names)) == len(names)
    assert set(SAMPLE) <= set(names)
