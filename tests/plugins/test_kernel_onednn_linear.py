"""`onednn-linear`: the numbers of torch's own products; what it does not understand is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build, prompts
from hypothesis import given
from hypothesis import strategies as st
from linear_shapes import LEADING, SIZES
from torch import nn

import jackfield
from jackfield.bridge import layer_proof
from jackfield.errors import ExecutionError, PlanError
from jackfield_plugins.kernel.many_rows import ROWS
from jackfield_plugins.kernel.onednn_linear import OneDnnLinear, linear_of

pytestmark = pytest.mark.skipif(bool(OneDnnLinear().available()), reason="needs oneDNN")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the inputs that torch's own products are given from now on."""
    seen: list[torch.Size] = []
    own = nn.Linear.forward

    def forward(self: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape)
        return own(self, rows)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return seen


@given(
    shape=LEADING,
    sizes=SIZES,
    bias=st.booleans(),
)
@torch.no_grad()
def test_products_are_torchs_but_for_rounding(shape, sizes, bias) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=bias)
    rows = torch.randn(*shape, sizes[0])
    found = linear_of(layer)(rows)
    exact = layer.double()(rows.double())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_many_rows_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = nn.Linear(16, 8), counted(monkeypatch)
    forward = linear_of(layer)
    forward(torch.randn(ROWS, 16))
    forward(torch.randn(1, 64, 16))
    assert not seen
    forward(torch.randn(ROWS - 1, 16))
    forward(torch.randn(16, 64).T)  # not contiguous
    assert len(seen) == 2
    layer.weight = nn.Parameter(torch.randn(8, 32)[:, ::2])
    forward(torch.randn(64, 16))
    assert len(seen) == 3


@torch.no_grad()
def test_layers_without_inputs_or_outputs() -> None:
    for inner, outer in ((0, 8), (8, 0), (0, 0)):
        layer, rows = nn.Linear(1, 1), torch.randn(ROWS, inner)
        layer.in_features, layer.out_features = inner, outer
        layer.weight, layer.bias = (nn.Parameter(torch.randn(n)) for n in ((outer, inner), outer))
        for some in (rows, rows[:0], rows[0]):
            assert torch.equal(linear_of(layer)(some), layer(some))


def test_numbers_of_another_kind_and_gradients_are_torchs() -> None:
    layer = nn.Linear(16, 8)
    rows = torch.randn(64, 16)
    linear_of(layer)(rows).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        wide = linear_of(layer.double())(rows.double())
        assert torch.equal(wide, layer(rows.double()))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear_of(nn.Linear(8, 8))(rows)


@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_tokens_are_the_same(family: str, cache: str) -> None:
    found, given = {}, prompts((5, 30, 70))
    for kernels in ("auto", "onednn-linear"):
        with jackfield.load(
            build(family, torch.float32), kernels=kernels, cache_implementation=cache
        ) as engine:
            done = engine.generate(given, max_new_tokens=6)
            found[kernels] = [one.token_ids for one in done]
            seen = [one for one in engine.report().observations if one.kind == "kernel"]
    assert found["onednn-linear"] == found["auto"]
    assert [one.calls > 0 for one in seen] == [True]
    assert "oneDNN in torch" in str(seen[0].source)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dtype": torch.bfloat16}, r"does not run with dtype bfloat16 \(only float32\)"),
        ({"deterministic": True}, "is not batch-invariant"),
    ],
)
def test_what_it_is_not_for_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        jackfield.plan("demo", kernels="onednn-linear", **({"dtype": torch.float32} | asked))


def one_after_the_other(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(*rows.shape[:-1], module.out_features)
        for at in range(module.in_features):
            found += rows[..., at, None] * module.weight[:, at]
        return found + module.bias

    return forward


@pytest.mark.parametrize("outputs", [1, 8, 700])
@pytest.mark.parametrize("inner", [16, 896, 8192])
@torch.no_grad()
@pytest.mark.one_in(4)
def test_sums_in_the_order_of_the_inputs_are_no_fault(inner: int, outputs: int) -> None:
    """Their errors grow with the root of their number: what is allowed must, too."""
    module = nn.Linear(inner, outputs)
    layer_proof.compare("it", module, one_after_the_other(module))  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match="does not compute what Linear does"):
        layer_proof.compare("it", module, lambda rows: module(rows.bfloat16().float()))  # type: ignore[arg-type]


@torch.no_grad()
def test_an_output_next_to_nothing_is_rounded_as_the_others_are() -> None:
    module = nn.Linear(896, 1)
    (row,) = layer_proof._rows(module, ((1,),))
    module.bias.zero_()
    module.weight -= module(row) * row / row.square().sum()
    layer_proof.compare("it", module, one_after_the_other(module))  # type: ignore[arg-type]
