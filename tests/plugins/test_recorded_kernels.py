"""Kernels in the place of layers, in steps that are recorded whole; and those that `auto` takes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import marked
from fake_cuda import FakeCuda, Gpu
from families import build, config_of, prompts
from recordable import offer
from tape import Tapes, record_on
from torch import nn

import jackfield
from jackfield.bridge.layers import bind_layers
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities
from jackfield.errors import PlanError
from jackfield.registry.backends import Choice, Registered
from jackfield.registry.discovery import registry
from jackfield.spelling import AUTO

POOL = "paged?page_size=4&num_tokens=512"
GREW = 3.0


class Doubler(Kernel):
    """Heads, whose function is torch's; its launches go onto the tape."""

    name = "doubler"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}), recordable=True)

    def fits(self, module: nn.Module, options: Any) -> bool:
        return type(module) is nn.Linear

    def bind(self, context: BindContext) -> FusedLayer:
        return FusedLayer(
            lambda module: lambda rows: torch.nn.functional.linear(rows, module.weight, module.bias)
        )


class Gated(Doubler):
    """MLPs too, which call their parts with several rows and not with one."""

    name = "gated"

    def fits(self, module: nn.Module, options: Any) -> bool:
        return type(module).__name__ == "LlamaMLP" or type(module) is nn.Linear

    def bind(self, context: BindContext) -> FusedLayer:
        linear = torch.nn.functional.linear

        def mlp(module: Any, rows: torch.Tensor) -> Any:
            if rows.numel() > rows.shape[-1]:
                return type(module).forward(module, rows)
            opened = torch.nn.functional.silu(linear(rows, module.gate_proj.weight))
            return linear(opened * linear(rows, module.up_proj.weight), module.down_proj.weight)

        def make(module: Any) -> Any:
            if type(module) is nn.Linear:
                return lambda rows: linear(rows, module.weight, module.bias)
            return lambda rows: mlp(module, rows)

        return FusedLayer(make)


class Counter(Doubler):
    """The same, which does not say that it can be recorded."""

    name = "counter"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}))


class Reader(Doubler):
    """Says so, and reads on the host: what was recorded stays what it was."""

    name = "reader"

    def bind(self, context: BindContext) -> FusedLayer:
        def make(module: Any) -> Callable[..., Any]:
            def forward(rows: torch.Tensor) -> torch.Tensor:
                scale = float(rows.abs().sum()) * 0 + 1 + 0.5 * float(rows.flatten()[0] > 0)
                linear: torch.Tensor = torch.nn.functional.linear(rows, module.weight, module.bias)
                return linear * (scale if len(rows.shape) == 3 and rows.shape[1] < 3 else 1)

            return forward

        return FusedLayer(make)


class Mine(Tapes):
    changes = True


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch, Mine)
    offer(monkeypatch)
    known = registry().backends["kernel"]
    mine = [Registered(one(), "stranger", "1.0", "ep") for one in (Doubler, Gated, Counter, Reader)]
    monkeypatch.setitem(registry().backends, "kernel", [*known, *mine])


def load(kernel: str | None, **more: Any) -> jackfield.Engine:
    asked = {"compile": "cuda_graph", "attn_implementation": "gathers", "max_batch_size": 4, **more}
    kernels = {} if kernel is None else {"kernels": kernel}
    return jackfield.load(build("llama"), cache_implementation=POOL, **kernels, **asked)


def test_they_are_recorded_and_counted_in_each_step(tapes: None) -> None:
    texts = prompts((3, 9, 1))
    with load(None) as engine:
        due = [c.token_ids for c in engine.generate(texts, max_new_tokens=9)]
        steps = engine._loop.steps
    with load("doubler") as engine:
        assert engine.report()["kernel"].calls == 0  # nobody asked for what recording took
        assert [c.token_ids for c in engine.generate(texts, max_new_tokens=9)] == due
        used = engine.report()
        heads = sum(type(module) is nn.Linear for module in engine._bound.model.modules())
        assert used["compiler"].compiled.whole == 8
        assert (engine._loop.steps, used["kernel"].calls) == (steps, steps * heads)


def test_calls_are_those_of_the_size_that_is_played(tapes: None) -> None:
    """A layer that calls others with several rows alone, in eager steps and in recorded ones."""
    found = []
    for more in ({}, {"compile": "none"}):
        with load("gated", **more) as engine:
            before, told = 0, []
            for count in (1, 2, 1, 4, 3):
                engine.generate([[3 + n, 4] for n in range(count)], max_new_tokens=5)
                calls = engine.report()["kernel"].calls
                told.append(calls - before)
                before = calls
            found.append(told)
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] < found[0][1]


def test_who_cannot_be_recorded_is_refused_or_goes_first(tapes: None) -> None:
    with pytest.raises(PlanError, match=r"'plugin:counter' cannot run .* does not declare rec"):
        load("counter")
    with load("counter", compile=AUTO) as engine:
        assert engine.plan["compiler"].registered.name == "none"
    with pytest.raises(PlanError, match="cannot be traced, and steps are"):
        load("doubler", compile="cuda_graph?fuse=true")


def test_a_copy_of_a_live_model_has_its_own_layers(tapes: None) -> None:
    """Not kernels that read the weights of the model it was copied from."""
    ids = torch.tensor([[5, 6, 7]])
    due = build("llama")(ids).logits
    with load("doubler") as engine:
        copied: Any = copy.deepcopy(engine._bound.model)
        copied.set_attn_implementation("eager")
        with torch.no_grad():
            copied.lm_head.weight.mul_(-2)
        calls = engine.report()["kernel"].calls
        assert torch.allclose(copied(ids).logits, -2 * due)
        assert engine.report()["kernel"].calls == calls


def test_who_reads_on_the_host_is_found(tapes: None) -> None:
    with pytest.raises(jackfield.errors.PluginError, match="kernel 'reader' of stranger"):
        load("reader")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return FakeCuda([Gpu(capability=(9, 0))]).install(monkeypatch)


def names(plan: jackfield.Plan) -> list[str]:
    return [choice.registered.name for choice in plan.kernels]


@marked("triton")
def test_auto_takes_them_where_steps_are_recorded(hopper: FakeCuda) -> None:
    plan = jackfield.plan(config_of("llama"), dtype="bfloat16")
    assert names(plan) == ["triton-one-row", "triton-rms-norm", "triton-rotary"]
    assert "kernel: triton-one-row (auto)" in str(plan)
    gpt2 = jackfield.plan(
        config_of("gpt2"), dtype="bfloat16"
    )  # has neither MLPs nor norms of these
    assert names(gpt2) == ["triton-one-row"]  # its head
    for other in ({"compile": "none"}, {"cache_implementation": "dynamic"}):
        assert names(jackfield.plan(config_of("llama"), **other)) == []
    assert names(jackfield.plan(config_of("llama"), kernels="none")) == []
    named = jackfield.plan(config_of("llama"), kernels="triton-rms-norm")
    assert names(named) == ["triton-rms-norm"]
    assert named["compiler"].registered.name == "cuda_graph"


def test_auto_goes_on_without_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Doubler):
        def bind(self, context: BindContext) -> FusedLayer:
            return FusedLayer(lambda module: lambda rows: module.weight.new_zeros(len(rows), 1))

    model = build("llama")
    choice = Choice(Registered(Wrong(), "stranger", "1.0", "ep"), None, AUTO)
    assert bind_layers([choice], model, lambda _: None) == []  # type: ignore[arg-type, return-value]
    assert "auto goes on without kernel 'doubler' of stranger 1.0" in caplog.text


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="Triton runs on a GPU or, with TRITON_INTERPRET=1, in Python",
)


@marked("triton")
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "outputs"), [(40, 7), (2100, 5), (64, 33), (1, 1)])
@pytest.mark.one_in(4)
def test_one_row(dtype: torch.dtype, bias: bool, size: int, outputs: int) -> None:
    from jackfield_plugins.kernel.triton_one_row.launch import linear

    torch.manual_seed(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = nn.Linear(size, outputs, bias=bias, device=device, dtype=dtype)
    exact = nn.Linear(size, outputs, bias=bias, device=device, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    forward = linear(layer)
    for shape in ((), (1,), (1, 1), (2,), (5,)):
        rows = torch.randn(*shape, size, device=device, dtype=dtype)
        with torch.no_grad():
            found, own, due = forward(rows), layer(rows), exact(rows.double())
        assert (found.shape, found.dtype) == (own.shape, dtype)
        allowed = 2 * (own - due).abs().max() + 4 * torch.finfo(dtype).eps * due.abs().max()
        assert (found - due).abs().max() <= allowed


@marked("triton")
@interpreted
def test_a_norm_whose_weight_is_copied_begins_behind_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jackfield_plugins.kernel.rms_norm import Meaning
    from jackfield_plugins.kernel.triton_rms_norm import launch

    early: list[bool] = []
    whole = launch.compiled
    monkeypatch.setattr(launch, "compiled", lambda *key: early.append(key[-1]) or whole(*key))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, weight = torch.randn(3, 32, device=device), torch.randn(64, device=device)
    for some, in_place in ((weight[:32], True), (weight[::2], False)):
        found = launch.rms_norm(rows, some, Meaning(1e-6, 0, rounds_first=False))
        due = torch.nn.functional.rms_norm(rows, (32,), some, 1e-6)
        assert torch.allclose(found, due, atol=1e-6)
        assert early.pop() is in_place


@marked("triton")
@interpreted
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_gated_mlps(family: str) -> None:
    from jackfield_plugins.kernel.triton_one_row.launch import gated

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer: Any = build(family).model.layers[0].mlp.to(device, torch.float32)
    forward = gated(layer)
    for count in (1, 2, 6):
        rows = torch.randn(1, count, layer.gate_proj.in_features, device=device)
        with torch.no_grad():
            assert torch.allclose(forward(rows), layer(rows), atol=1e-5)


@pytest.mark.long
def test_they_compile_for_gpus_and_read_weights_in_wide_loads(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_one_row.py")
    native = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=native, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 2 * 3 * 3 * 4 + 3 * 3
    assert all(one["wide"] >= 2 for one in told if one["size"] > 40)
