"""Fused layers: equal to what they replace, counted, taken out again, or refused by name."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompts
from torch import nn

import jackfield
from jackfield.bridge.layer_proof import compare
from jackfield.cli import run
from jackfield.errors import ExecutionError, JackfieldError, PlanError
from jackfield_plugins.hub_kernels import KernelRefused
from jackfield_plugins.hub_kernels.probing import probe
from jackfield_plugins.kernel.rms_norm import is_rms_norm, meaning_of

pytest.importorskip("triton", reason="needs jackfield[triton]")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="Triton runs on a GPU or, with TRITON_INTERPRET=1, in Python",
)
TRITON, CPU = "plugin:triton-rms-norm", "plugin:cpu-rms-norm"
#: family -> how many RMSNorm layers it has, and what its weight means
FAMILIES = {
    "llama": (5, 0),
    "qwen3": (9, 0),
    "gemma2": (9, 1),
    "gemma3": (13, 1),
    "mixtral": (5, 0),
}

LAYERS = """
import torch
from torch import nn

class RMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)

class Wrong(nn.Module):
    def forward(self, hidden_states):
        return hidden_states * 2
"""


@pytest.fixture
def hub(kernel: Callable[..., Path]) -> str:
    """The selection of a kernel repository on this machine."""
    folder = kernel("from . import layers\n")
    (folder / "build" / "torch-cpu" / "layers.py").write_text(LAYERS)
    return "plugin:hub-layer?repo=me/kernel&revision=v1"


def ids(engine: Any) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(prompts((5, 9)), max_new_tokens=8)]


def refusal(model: Any, kernels: Any, **more: Any) -> str:
    with pytest.raises(JackfieldError) as caught:
        jackfield.load(model, kernels=kernels, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kernel", [pytest.param(TRITON, marks=needs_interpreter), CPU])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(4)
def test_rms_norm_in_every_family(kernel: str, family: str, dtype: torch.dtype) -> None:
    count, offset = FAMILIES[family]
    model = build(family, dtype)
    norms = [m for m in model.modules() if is_rms_norm(m)]
    for norm in norms:
        nn.init.normal_(norm.weight, 1 - offset, 0.2)
    assert {meaning_of(norm).offset for norm in norms} == {offset}
    with jackfield.load(model) as engine:
        plain = ids(engine)
    with jackfield.load(model, kernels=kernel) as engine:
        found = ids(engine)
        seen = engine.report()["kernel"]
        assert seen.source.startswith(f"{count} ")
        assert seen.calls == count * engine.report()["cache"].calls
        assert f"kernel: {kernel.removeprefix('plugin:')} (named)" in engine.explain()
    assert all("forward" not in vars(norm) for norm in norms)
    if dtype is torch.float32:
        assert found == plain


@pytest.mark.parametrize("kernel", [pytest.param(TRITON, marks=needs_interpreter), CPU])
def test_it_goes_with_deterministic(kernel: str) -> None:
    with jackfield.load(
        build("llama", torch.float32), kernels=kernel, deterministic=True
    ) as engine:
        together = engine.generate(prompts((5, 9)), max_new_tokens=6, logprobs=1)
        alone = [engine.generate(p, max_new_tokens=6, logprobs=1)[0] for p in prompts((5, 9))]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]


def test_a_layer_of_the_hub(hub: str) -> None:
    model = build("llama", torch.float32)
    with jackfield.load(model) as engine:
        plain = ids(engine)
    with jackfield.load(model, kernels=hub) as engine:
        assert ids(engine) == plain
        assert engine.report()["kernel"].source.startswith(
            "5 LlamaRMSNorm of me/kernel@v1 (torch-cpu"
        )
    assert jackfield.plan(model, kernels=[hub]).kernels[0].registered.name == "hub-layer"


def test_refusals(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", torch.float32)
    wrong = f"{hub}&layer=Wrong&replaces=RMSNorm"
    assert "does not compute what LlamaRMSNorm does" in refusal(model, wrong)
    assert "it has no layer 'Nothing' (its layers: RMSNorm, Wrong)" in refusal(
        model, f"{hub}&layer=Nothing"
    )
    assert "finds no layer to replace" in refusal(build("gpt2", torch.float32), hub)
    assert "both replace LlamaRMSNorm" in refusal(model, [hub, hub])
    disk = refusal("demo", CPU, device_map={"": "cpu", "model.layers.0": "disk"})
    assert "weights lie on cpu, disk" in disk
    assert "kernels='auto' goes with no other" in refusal(model, ["auto", hub])
    assert "there is no kernel 'triton'" in refusal(model, "triton")
    assert "cannot run" in refusal(build("llama", torch.float64), TRITON)
    monkeypatch.setenv("JACKFIELD_TRUSTED_PUBLISHERS", "")
    assert "is not trusted" in refusal(model, hub)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        assert "there is no CUDA GPU" in refusal(model, TRITON)
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_refused_kernel_loads_no_weight(hub: str) -> None:
    gpt2 = build("gpt2").config
    for model in ("demo", gpt2):
        with pytest.raises(PlanError, match="batch-invariant"):
            jackfield.plan(model, kernels=hub, deterministic=True)
    with pytest.raises(PlanError, match="finds no layer to replace in GPT2LMHeadModel; drop it"):
        jackfield.plan(gpt2, kernels=hub)
    with pytest.raises(PlanError, match="both replace LlamaRMSNorm; name one of them"):
        jackfield.plan("demo", kernels=[hub, CPU])
    assert jackfield.plan("demo", kernels=hub).kernels


def test_what_replaces_nothing_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("gpt2", torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("jackfield.api.read_weights", lambda *_: pytest.fail("weights were read"))
    assert "finds no layer to replace" in refusal(str(tmp_path), CPU)


def test_a_kernel_for_layers_that_a_quantizer_makes_is_planned(hub: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs jackfield[bnb]")
    chosen = {"kernels": f"{hub}&replaces=Linear8bitLt", "device_map": "cpu"}
    assert jackfield.plan("demo", quantization="bnb-8bit", **chosen).kernels
    with pytest.raises(PlanError, match="finds no layer to replace"):
        jackfield.plan("demo", **chosen)


@pytest.mark.parametrize(
    ("source", "says"),
    [("import os; os.abort()", "crashed its process"), ("import os; os._exit(3)", "exit code 3")],
)
def test_a_layer_is_tried_in_a_process_that_begins_anew(
    source: str, says: str, kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests fork such processes from one that has imported torch."""
    folder = kernel(source) / "build" / "torch-cpu"
    monkeypatch.setattr("jackfield_plugins.hub_kernels.probing.subprocess", subprocess)
    with pytest.raises(KernelRefused, match=says):
        probe("jackfield_plugins.kernel.hub_probe", {"folder": str(folder), "layer": "Any"})


def test_the_comparison_tells_rounding_from_another_function() -> None:
    norm = next(m for m in build("llama", torch.bfloat16).modules() if is_rms_norm(m))
    compare("it", norm, norm)  # type: ignore[arg-type]
    exact = copy.deepcopy(norm).double()
    compare("it", norm, lambda x: exact(x.double()).to(x.dtype))  # type: ignore[arg-type]
    for other in (lambda x: norm(x) * 1.1, lambda x: norm(x) + float("nan"), lambda x: norm(x)[:1]):
        with pytest.raises(ExecutionError):
            compare("it", norm, other)  # type: ignore[arg-type]


def test_on_the_command_line(hub: str, capfd: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> Any:
        assert run([*arguments, "--kernel", hub, "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    capfd.readouterr()
    assert told("generate", "Sort these numbers: 3 1 2")["report"]["kernel"]["calls"] > 0
    verdicts = {
        b["name"]: b["verdict"] for b in told("explain")["backends"] if b["kind"] == "kernel"
    }
    assert verdicts["hub-layer"] == "chosen"


def test_explain_knows_which_kernels_find_no_layer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build("gpt2", torch.float32).save_pretrained(tmp_path)
    capfd.readouterr()
    assert run(["explain", str(tmp_path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["backends"]
    (told,) = (backend for backend in found if backend["name"] == "cpu-rms-norm")
    assert told["verdict"] == "refused"
    assert "finds no layer to replace" in told["reasons"][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 64), (2, 5, 1030), (700, 192), (0, 16)])
def test_cpu_rms_norm_of_any_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from jackfield_plugins.kernel.cpu_rms_norm.call import rms_norm_of

    norm = LlamaRMSNorm(shape[-1]).to(dtype)
    nn.init.normal_(norm.weight)
    forward = rms_norm_of(norm)
    rows = torch.randn(shape, dtype=dtype)
    tolerance = 4 * torch.finfo(dtype).eps  # a root, two products and the order of a sum
    torch.testing.assert_close(forward(rows), norm(rows), rtol=tolerance, atol=tolerance)
    across = torch.randn(shape[-1], 3, dtype=dtype).T  # not contiguous
    torch.testing.assert_close(forward(across), norm(across), rtol=tolerance, atol=tolerance)
    if dtype is torch.bfloat16:  # the layer's own way
        assert torch.equal(forward(rows.float()), norm(rows.float()))
