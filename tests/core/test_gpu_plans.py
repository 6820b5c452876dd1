"""What `auto` takes on a GPU, and what it says of what would be faster: plans without one."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from fake_cuda import FakeCuda, Gpu
from families import config_of

import jackfield
from jackfield.errors import PlanError
from jackfield.planning.planning import Plan

if TYPE_CHECKING:
    from command_line import Cli

pytest.importorskip("triton", reason="needs jackfield[triton]")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return gpu(monkeypatch, (9, 0))


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> FakeCuda:
    """One GPU, with a Triton that compiles for it."""
    patch.setenv("TRITON_INTERPRET", "0")
    return FakeCuda([Gpu(capability=capability)]).install(patch)


def installed(patch: pytest.MonkeyPatch, name: str) -> None:
    """A package with flash-attn's functions."""

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, softmax_scale: Any = None, causal: Any = False,
        window_size: Any = (-1, -1), softcap: Any = 0.0, block_table: Any = None,
    ) -> Any: ...  # fmt: skip

    module = ModuleType(name)
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.__spec__ = sys.__spec__  # found, wherever it is
    patch.setitem(sys.modules, name, module)


def no_hub(patch: pytest.MonkeyPatch) -> None:
    from jackfield_plugins.attention.sources import HubKernel

    def fetched(*_: Any) -> None:
        raise AssertionError("auto fetches no code from the hub")

    patch.setattr(HubKernel, "_vetted", fetched)


def chosen(plan: Plan) -> tuple[str, str]:
    return plan["cache"].registered.name, plan["attention"].registered.name


def faster(plan: Plan) -> list[str]:
    return [refusal.registered.name for refusal in plan.faster]


FLASH = ["flash_attention_3", "flash_attention_2"]


@pytest.mark.parametrize(
    ("family", "capability", "dtype", "packages", "takes", "would_be_faster"),
    [
        ("llama", (9, 0), "bfloat16", ["flash_attn_interface"], "flash_attention_3", []),
        ("llama", (9, 0), "bfloat16", ["flash_attn"], "flash_attention_2", FLASH[:1]),
        ("llama", (8, 0), "float16", [], "flash_attention_2", FLASH[:1]),  # torch's varlen_attn
        ("mistral", (8, 0), "bfloat16", [], "flash_attention_2", FLASH[:1]),
        ("llama", (8, 0), "float32", ["flash_attn"], "triton", FLASH),
        ("gpt-oss", (9, 0), "bfloat16", ["flash_attn"], "triton", FLASH),  # sinks
        ("gemma2", (8, 0), "bfloat16", [], "triton", FLASH),  # softcap
        ("gemma2", (8, 0), "bfloat16", ["flash_attn"], "flash_attention_2", FLASH[:1]),
        ("deepseek-v3", (9, 0), "bfloat16", ["flash_attn"], "triton", FLASH),  # two head sizes
        ("llama", (7, 5), "float16", ["flash_attn"], "sdpa", [*FLASH, "triton"]),
    ],
)
@pytest.mark.parametrize("cache", ["auto", "paged"])
def test_auto_takes_the_best_packed_attention(
    family: str,
    capability: tuple[int, int],
    dtype: str,
    packages: list[str],
    takes: str,
    would_be_faster: list[str],
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, capability)
    no_hub(monkeypatch)
    for name in packages:
        installed(monkeypatch, name)
    model, asked = config_of(family), {"dtype": dtype, "cache_implementation": cache}
    plan = jackfield.plan(model, compile="none", **asked)
    assert chosen(plan) == ("paged", takes)
    assert faster(plan) == would_be_faster == plan.to_dict()["faster"]
    for name in would_be_faster:
        assert f"would be faster: attention {name} (" in str(plan)


@pytest.mark.parametrize("packages", [[], ["flash_attn"], ["flash_attn_interface"]])
def test_steps_that_are_recorded_come_before_the_best_attention(
    packages: list[str], monkeypatch: pytest.MonkeyPatch, hopper: FakeCuda
) -> None:
    """With each of its own steps launched by Python, no attention is as fast."""
    no_hub(monkeypatch)
    for name in packages:
        installed(monkeypatch, name)
    plan = jackfield.plan(config_of("llama"), dtype="bfloat16")
    assert (*chosen(plan), plan["compiler"].registered.name) == ("paged", "triton", "cuda_graph")
    assert not [name for name in faster(plan) if name == "flash_attention_2"]
    assert "recorded: whole decode steps" in str(plan)
    if packages == ["flash_attn"]:
        named = jackfield.plan(
            config_of("llama"), dtype="bfloat16", attn_implementation="flash_attention_2"
        )
        assert named["compiler"].registered.name == "none"
    padded = jackfield.plan(config_of("llama"), cache_implementation="dynamic")
    assert padded["compiler"].registered.name == "none"


def test_padded_rows_keep_sdpa(hopper: FakeCuda) -> None:
    plan = jackfield.plan(config_of("llama"), dtype="bfloat16", cache_implementation="dynamic")
    assert chosen(plan) == ("dynamic", "sdpa")
    assert plan.faster == ()


def test_what_cannot_be_packed_is_padded(hopper: FakeCuda) -> None:
    plan = jackfield.plan(config_of("bloom"), dtype="bfloat16")
    assert plan["cache"].registered.name == "dynamic"


def test_named_backends_are_taken_and_nothing_is_said_of_others(
    hopper: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    plan = jackfield.plan(config_of("llama"), dtype="bfloat16", attn_implementation="sdpa")
    assert chosen(plan) == ("paged", "sdpa")
    assert plan.faster == ()
    assert "faster" not in caplog.text
    with pytest.raises(PlanError, match="flash-attn-3: is not installed"):
        jackfield.plan(
            config_of("llama"), dtype="bfloat16",
            attn_implementation="flash_attention_3?source=package",
        )  # fmt: skip


def test_pages_that_flash_cannot_read_in_place_are_for_triton(hopper: FakeCuda) -> None:
    found = {}
    for size in (16, 256):
        cache = f"paged?page_size={size}"
        plan = jackfield.plan(
            config_of("llama"), dtype="bfloat16", cache_implementation=cache, compile="none"
        )
        found[size] = chosen(plan)[1]
    assert found == {16: "triton", 256: "flash_attention_2"}


def test_a_kernel_of_torch_that_reads_no_pages_is_for_nobody(
    hopper: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
        return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1),
    ) -> Any: ...  # fmt: skip

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    for cache in ("auto", "paged", "paged?page_size=256"):
        plan = jackfield.plan(config_of("llama"), dtype="bfloat16", cache_implementation=cache)
        assert chosen(plan) == ("paged", "triton")


def test_start_up_warns_of_the_slow_one_and_tells_the_reasons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cli: Cli
) -> None:
    gpu(monkeypatch, (7, 5))
    jackfield.plan(config_of("llama"), dtype="float16")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    told = record.getMessage()
    assert "auto chose attention 'sdpa'" in told
    assert "one sequence after another" in told
    assert "flash_attention_2 (needs a GPU of compute capability 8.0 or later; this one has" in told
    assert "cpu_decode" not in told
    said = cli("explain", "demo", "--dtype", "float16")
    assert "would be faster: attention triton (needs a GPU of compute" in " ".join(said.out.split())


def test_the_cpu_is_as_it_was() -> None:
    plan = jackfield.plan("demo", device_map="cpu")
    assert plan["cache"].registered.name == "paged"
    assert chosen(plan)[1] in ("cpu_decode", "sdpa")


def test_a_gpu_that_is_elsewhere_is_planned_for_in_the_same_way() -> None:
    found = jackfield.estimate(
        config_of("llama"), dtype="bfloat16", device_map="cuda", device_memory="80GB"
    )
    plan = found.plan
    assert (*chosen(plan), plan["compiler"].registered.name) == ("paged", "triton", "cuda_graph")


def test_a_plan_for_a_gpu_that_is_elsewhere_can_be_read() -> None:
    plan = jackfield.estimate("demo", device_map="h200", dtype="bfloat16").plan
    assert "recorded: whole decode steps" in str(plan)
    assert plan.memory() is None
