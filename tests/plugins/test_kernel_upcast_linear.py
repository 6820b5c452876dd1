"""`upcast-linear`: numbers nearer to the exact ones than torch's; also beside compiled steps."""

from __future__ import annotations

import copy
import math
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
from jackfield_plugins.kernel import upcast_linear
from jackfield_plugins.kernel.many_rows import ROWS
from jackfield_plugins.kernel.upcast_linear import PANEL, linear_of

DTYPES = (torch.bfloat16, torch.float16)


@given(
    shape=LEADING,
    sizes=SIZES,
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    panel=st.sampled_from((1, 100, PANEL)),
)
@torch.no_grad()
def test_products_are_rounded_once(shape, sizes, bias, dtype, panel) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    rows = torch.randn(*shape, sizes[0], dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcast_linear, "PANEL", panel)
        found = linear_of(layer)(rows)
    own = layer(rows)
    exact = layer.double()(rows.double())
    assert (found.dtype, found.shape) == (dtype, own.shape)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, atol=1e-5 + rounding / 8, rtol=rounding)


@torch.no_grad()
def test_what_is_many_rows_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(16, 8, dtype=torch.bfloat16)
    forward, seen = linear_of(layer), []
    own = nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, rows: (seen.append(rows.shape), own(self, rows))[1]
    )
    forward(torch.randn(ROWS, 16, dtype=torch.bfloat16))
    forward(torch.randn(16, 64, dtype=torch.bfloat16).T)
    forward(torch.randn(2, 32, 16, dtype=torch.bfloat16).transpose(0, 1))
    assert not seen
    forward(torch.randn(ROWS - 1, 16, dtype=torch.bfloat16))
    assert len(seen) == 1


def test_numbers_of_another_kind_and_gradients_are_torchs() -> None:
    layer = nn.Linear(16, 8, dtype=torch.bfloat16)
    rows = torch.randn(64, 16, dtype=torch.bfloat16)
    linear_of(layer)(rows).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            linear_of(layer)(rows.half())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear_of(nn.Linear(8, 8, dtype=torch.bfloat16))(rows)
        wide = linear_of(layer.double())(rows.double())
        assert torch.equal(wide, layer(rows.double()))


@torch.no_grad()
def test_layers_without_inputs_or_outputs() -> None:
    for inner, outer in ((0, 8), (8, 0), (0, 0)):
        layer, rows = nn.Linear(1, 1), torch.randn(ROWS, inner, dtype=torch.bfloat16)
        layer.in_features, layer.out_features = inner, outer
        layer.weight, layer.bias = (
            nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in ((outer, inner), outer)
        )
        for some in (rows, rows[:0], rows[0]):
            assert torch.equal(linear_of(layer)(some), layer(some))


@pytest.mark.parametrize("fast", [True, False])
def test_auto_takes_it_where_torch_has_no_instructions(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upcast_linear, "_is_fast", lambda dtype: fast)

    def taken(**asked: Any) -> list[str]:
        return [str(kernel.registered) for kernel in jackfield.plan("demo", **asked).kernels]

    found = taken(dtype="bfloat16")
    assert any("upcast-linear" in one for one in found) is not fast
    assert taken(dtype="float32") == []
    assert taken(dtype="bfloat16", deterministic=True) == []
    assert taken(dtype="bfloat16", kernels="none") == []
    assert taken(dtype="bfloat16", compile="inductor") == found


@pytest.mark.parametrize("compiler", ["none", "native"])
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.bfloat16, "upcast-linear"), (torch.float32, "onednn-linear")],
    ids=["upcast", "onednn"],
)
@pytest.mark.one_in(4)
def test_prompts_go_through_it_also_where_steps_are_compiled(
    dtype: torch.dtype, kernel: str, compiler: str
) -> None:
    model = build("llama", dtype)
    forwards = [vars(module).get("forward") for module in model.modules()]
    found = {}
    for kernels in ("none", kernel):
        with jackfield.load(model, kernels=kernels, compile=compiler) as engine:
            done = engine.generate(prompts((70, 80, 100)), max_new_tokens=6)
            found[kernels] = [one.token_ids for one in done]
            seen = [one for one in engine.report().observations if one.kind == "kernel"]
    count = sum(type(module) is nn.Linear for module in model.modules())
    assert [one.calls >= count for one in seen] == [True]
    if compiler == "native":  # decode steps are the compiler's
        assert seen[0].calls <= 3 * count
    if dtype is torch.float32:
        assert found[kernel] == found["none"]
    assert [vars(module).get("forward") for module in model.modules()] == forwards


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.bfloat16, "upcast-linear"), (torch.float32, "onednn-linear")],
    ids=["upcast", "onednn"],
)
@pytest.mark.parametrize("compiler", ["none", "native", "inductor?backend=eager"])
@pytest.mark.parametrize(
    "asked", [{"verify": 2}, {"output_hidden_states": True}, {"output_attentions": True}], ids=str
)
@pytest.mark.one_in(4)
def test_what_looks_at_the_models_own_layers(
    dtype: torch.dtype, kernel: str, compiler: str, asked: dict[str, Any]
) -> None:
    model = build("llama", dtype)
    at_load = {name: value for name, value in asked.items() if name == "verify"}
    of_request = {name: value for name, value in asked.items() if name != "verify"}
    with jackfield.load(model, kernels=kernel, compile=compiler, **at_load) as engine:
        found = engine.generate(prompts((70, 9)), max_new_tokens=4, **of_request)
        assert [one.finish_reason for one in found] == ["length"] * 2
        for name in of_request:
            assert all(getattr(one, name.removeprefix("output_")) is not None for one in found)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert [one.error for one in found] == [None, None]


def test_a_trace_shows_it_beside_compiled_steps() -> None:
    with jackfield.load(
        build("llama", torch.bfloat16), kernels="upcast-linear", compile="native"
    ) as engine:
        with engine.trace() as trace:
            engine.generate(prompts((70, 80)), max_new_tokens=3)
        assert "upcast-linear" in str(trace)


@torch.no_grad()
def test_an_output_head_is_compared_a_few_outputs_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float64 it would take four times what it does; a wrong output is found in any part."""
    sizes: list[int] = []
    own = torch.Tensor.double
    monkeypatch.setattr(
        torch.Tensor, "double", lambda self: (sizes.append(self.numel()), own(self))[1]
    )
    monkeypatch.setattr(layer_proof, "_AT_ONCE", 256)
    head = nn.Linear(16, 1000, dtype=torch.bfloat16)
    for bias in (head.bias, None):
        head.bias = bias
        sizes.clear()
        layer_proof.compare("it", head, linear_of(head))  # type: ignore[arg-type]
        assert max(sizes) <= max(map(math.prod, layer_proof._SHAPES)) * 1000  # outputs of rows
        wrong = copy.deepcopy(head)
        wrong.weight[-1] += 1
        with pytest.raises(ExecutionError, match="does not compute what Linear does"):
            layer_proof.compare("it", head, linear_of(wrong))  # type: ignore[arg-type]


def test_deterministic_refuses_it() -> None:
    with pytest.raises(PlanError, match="is not batch-invariant"):
        jackfield.plan("demo", dtype="bfloat16", kernels="upcast-linear", deterministic=True)
