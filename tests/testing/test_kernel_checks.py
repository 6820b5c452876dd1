"""The checks of kernels: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
from kernel import ZOO, of
from right_kernel import Right
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield_plugins.kernel.cpu_rms_norm import CpuRmsNorm

SAMPLE = (
    "no weight", "a sum for a mean", "columns beyond 128 forgotten", "strides ignored",
    "into its input", "a copy of the weight",
)  # fmt: skip


def test_a_right_one_of_few_dtypes_passes() -> None:
    found = judged(of(dtypes=frozenset({"float32"})))
    assert_right(found)
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
    assert_right(judged(backend))


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
def test_a_wrong_kernel_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)
