"""The checks of kernels: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
import right_kernel as right
import torch
from kernel import ZOO, mlp, of, right_mlp
from right_kernel import Right, RightRotary
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield.testing.checks import verdict
from jackfield.testing.subject import uninstalled
from jackfield.testing.suites import checks_of
from jackfield_plugins.kernel.cpu_rms_norm import CpuRmsNorm
from jackfield_plugins.kernel.onednn_linear import OneDnnLinear
from jackfield_plugins.kernel.upcast_linear import UpcastLinear

SAMPLE = (
    "rows beyond 1024 forgotten", "wider copies by address", "one activation for all",
    "no weight", "a sum for a mean", "columns beyond 128 forgotten", "strides ignored",
    "into its input", "a copy of the weight", "neighbours paired", "all of a head turned",
    "heads beyond 8", "copies by version", "one room for all threads", "rows behind the last share",
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


def test_a_layer_that_overflows_in_float16_is_no_fault_of_a_kernel() -> None:
    with uninstalled(mlp(right_mlp)()) as subject:
        found = [verdict(c) for c in checks_of(subject) if c.name.startswith("LlamaMLP.dtype.")]
    assert_right(found, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "backend",
    [Right, RightRotary, CpuRmsNorm, OneDnnLinear, UpcastLinear],
    ids=["right", "right-rotary", "cpu-rms-norm", "onednn-linear", "upcast-linear"],
)
def test_right_ones_pass(backend: Any) -> None:
    assert_right(judged(backend))


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
@pytest.mark.one_in(4)
def test_a_wrong_kernel_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


def of_numpy(module: Any) -> Any:
    """Right, and nothing that a compiler could read."""

    def forward(rows: torch.Tensor) -> torch.Tensor:
        own = right.make(module)(rows)
        return torch.from_numpy(own.float().numpy()).to(rows.dtype)

    return forward


def as_if_traced_once(module: Any) -> Any:
    """Another function while a compiler reads it."""

    def forward(rows: torch.Tensor) -> torch.Tensor:
        found = right.make(module)(rows)
        return found * 1.01 if torch.compiler.is_compiling() else found

    return forward


@pytest.mark.parametrize(
    ("make", "offered", "told"),
    [
        (of_numpy, {}, "it cannot be traced"),
        (as_if_traced_once, {}, "what a compiler traces of it is"),
        (right.make, {"aten.cat.default": print}, "its functions call none of them"),
        (right.make, 7, "native_operators must return a dict, got 7"),
    ],
)
def test_what_cannot_be_traced_as_it_is_declared(make: Any, offered: Any, told: str) -> None:
    has = {"native_operators": lambda self: offered}
    with uninstalled(of(make, has, traceable=True)()) as subject:
        found = [verdict(c) for c in checks_of(subject) if ".traced.float32" in c.name]
    assert [one.outcome for one in found] == ["failed"]
    assert told in found[0].message


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)
