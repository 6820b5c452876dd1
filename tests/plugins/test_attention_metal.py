"""`metal_flash_sdpa` and its kernel's signature, on a kernel of that signature in plain torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import WINDOW, config_of, prompts

import jackfield
from jackfield.contracts import Requirements
from jackfield.errors import PlanError
from jackfield.planning.selecting import decide
from jackfield.registry.discovery import registry
from jackfield_plugins.attention.metal_flash_sdpa import MetalFlashSdpa
from jackfield_plugins.attention.published import kernel_of
from jackfield_plugins.attention.varlen import Rows, Scoring
from jackfield_plugins.attention.varlen_probe import reference

pytestmark = pytest.mark.usefixtures("local_kernels")

LENGTHS = (WINDOW - 2, WINDOW, 3 * WINDOW)
COUNT = 10
HUB = "plugin:hub?repo=me/metal&revision=v2"
FULL = ["full_attention", "full_attention"]

ON_MPS = Requirements(
    architecture="TinyForCausalLM",
    dtype="float16",
    device="mps",
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dims=(64,),
    layer_types=("full_attention",),
    windows=(None,),
    features={"grouped_query": "4 query heads on 2 key/value heads"},
)


@pytest.fixture
def metal(metal_folder: Path) -> ModuleType:
    """The kernel as a module of the test's own."""
    path = metal_folder / "build/torch-cpu/__init__.py"
    spec = importlib.util.spec_from_file_location("metal_of_this_test", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def needs(**changes: object) -> Requirements:
    return dataclasses.replace(ON_MPS, **changes)


@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=3", "paged?page_size=256"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 32}),
        ("llama-mqa", {"head_dim": 64}),
        ("gemma2", {"head_dim": 32, "layer_types": FULL}),
        ("gemma2", {"head_dim": 32, "layer_types": FULL, "attn_logit_softcapping": 1.0}),
    ],
    ids=["llama", "mqa", "softcap", "softcap-of-one"],
)
@pytest.mark.one_in(4)
def test_equals_eager(family: str, changes: dict[str, object], cache: str, tiny) -> None:
    model = tiny(family, **changes)
    found = {}
    for attention in ("eager", HUB):
        with jackfield.load(
            model, attn_implementation=attention, cache_implementation=cache
        ) as engine:
            done = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
            found[attention] = [c.token_ids for c in done]
    assert found[HUB] == found["eager"]


def step(*, strided: bool = False) -> tuple[torch.Tensor, ...]:
    """Two sequences of 2 and 3 queries on 4 and 3 keys; strided as views of a `[2, …]` tensor."""
    torch.manual_seed(0)
    query, pair = torch.randn(5, 4, 32), torch.randn(7, 2, 2, 32)
    keys, values = pair.unbind(1)
    if not strided:
        keys, values = keys.contiguous(), values.contiguous()
    return query, keys, values


ROWS = Rows(
    torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32), 3, 4
)


def test_strided_keys_are_made_contiguous(metal: ModuleType) -> None:
    query, keys, values = step(strided=True)
    wanted = reference(query, keys, values, ROWS, Scoring(0.3)).float()
    found = kernel_of(metal.flash_attention_varlen).attend(query, keys, values, ROWS, Scoring(0.3))
    torch.testing.assert_close(found, wanted)
    garbage = torch.empty_like(query)
    metal.flash_attention_varlen(
        garbage, query, keys, values, ROWS.cu_seqlens_q, ROWS.cu_seqlens_k, 3, 4, True, 0.3, 1.0
    )
    assert not torch.allclose(garbage, wanted, atol=1e-2)


@pytest.mark.parametrize(("softcap", "given"), [(None, 1.0), (30.0, 30.0), (1.0, 1.0 + 2.0**-23)])
def test_softcapping_of_one_means_none(
    softcap: float | None, given: float, metal: ModuleType
) -> None:
    query, keys, values = step()
    scoring = Scoring(0.3, softcap=softcap)
    found = kernel_of(metal.flash_attention_varlen).attend(query, keys, values, ROWS, scoring)
    torch.testing.assert_close(found, reference(query, keys, values, ROWS, scoring).float())
    assert metal.calls == [{"softcapping": given, "max_seqlen_q": 3}]
    assert torch.tensor(given) != 1 or softcap is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, metal: ModuleType) -> None:
    query, keys, values = (t.to(dtype) for t in step())
    found = kernel_of(metal.flash_attention_varlen).attend(query, keys, values, ROWS, Scoring())
    assert found.dtype == dtype
    wanted = reference(query, keys, values, ROWS, Scoring()).to(dtype)
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=0)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_refused_by_name_elsewhere() -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of("llama"), attn_implementation="plugin:metal_flash_sdpa")
    message = str(caught.value)
    assert "\n" not in message
    assert "needs an Apple GPU (MPS); none is here" in message
    assert "does not run with device cpu (only mps)" in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dims": (24,)}, "has no kernel for head size 24 (only 32, 64, 72"),
        ({"dtype": "float64"}, "does not run with dtype float64"),
        ({"features": {"sliding_window": "w"}}, "does not support sliding_window (w)"),
        ({"features": {"sinks": "s"}}, "does not support sinks (s)"),
        ({"device": "cuda"}, "does not run with device cuda (only mps)"),
        ({"model_declines": frozenset({"flash"})}, "must not run with flash"),
    ],
)
def test_what_it_cannot_do(changes: dict[str, object], says: str) -> None:
    reasons = MetalFlashSdpa().refuse(needs(**changes), None)
    assert says in "; ".join(reasons)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert MetalFlashSdpa().available() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (reason,) = MetalFlashSdpa().available()
    assert "pip install jackfield[kernels]" in reason


def chosen(attention: str, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """Which attention a plan for MPS takes, and the warnings it logs."""
    selections = {"attention": attention, "cache": "dynamic", "decoding": "sample"}
    with caplog.at_level(logging.INFO, logger="jackfield"):
        caplog.clear()
        plan = decide(registry(), ON_MPS, selections)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return plan["attention"].registered.name, warnings


def test_auto_takes_it_on_mps_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MetalFlashSdpa, "available", lambda self: [])
    monkeypatch.setattr(MetalFlashSdpa, "_choose", lambda *_: (MetalFlashSdpa.source, None, []))
    name, (warning,) = chosen("auto", caplog)
    assert name == "metal_flash_sdpa"
    assert warning.startswith("auto chose ")
    assert "metal_flash_sdpa" in warning
    assert "kernels-community/metal-flash-sdpa" in warning
    assert "name 'sdpa' to opt out" in warning
    assert "\n" not in warning
    assert chosen("metal_flash_sdpa", caplog) == ("metal_flash_sdpa", [])
    assert chosen("sdpa", caplog) == ("sdpa", [])
    monkeypatch.setattr(MetalFlashSdpa, "_choose", lambda *_: (None, ["no network"]))
    assert chosen("auto", caplog) == ("sdpa", [])


def test_the_whole_way_but_for_the_device(
    monkeypatch: pytest.MonkeyPatch, metal_folder: Path, tiny
) -> None:
    """Its own repository, from a local folder: trusted without being named, locked, tried."""
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/metal-flash-sdpa={metal_folder}")
    monkeypatch.setenv("JACKFIELD_TRUSTED_PUBLISHERS", "")
    here = dataclasses.replace(MetalFlashSdpa.capabilities, devices=frozenset({"cpu"}))
    monkeypatch.setattr(MetalFlashSdpa, "capabilities", here)
    monkeypatch.setattr(MetalFlashSdpa, "available", lambda self: [])
    monkeypatch.setattr(MetalFlashSdpa, "auto_rank", 100)
    model = tiny("llama", head_dim=32)
    with jackfield.load(model, attn_implementation="eager") as engine:
        expected = [c.token_ids for c in engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)]
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        found = [c.token_ids for c in engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)]
        seen = engine.report()["attention"]
    assert found == expected
    assert seen.name == "metal_flash_sdpa"
    assert seen.source is not None
    assert seen.source.startswith("kernels-community/metal-flash-sdpa@v2 (torch-cpu, sha256:")


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU (MPS)")
def test_on_a_real_apple_gpu(monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    monkeypatch.delenv("LOCAL_KERNELS")
    model = tiny("llama", head_dim=64).to("mps")
    found = {}
    for attention in ("eager", "metal_flash_sdpa"):
        with jackfield.load(model, attn_implementation=attention) as engine:
            done = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
            found[attention] = [c.token_ids for c in done]
    assert found["metal_flash_sdpa"] == found["eager"]
