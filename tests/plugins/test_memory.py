"""What a plan says about memory is what loading and running then take, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, config_of, prompts
from transformers import cache_utils

import jackfield
from jackfield import devices
from jackfield.devices import free_bytes
from jackfield.errors import CacheFullError, OptionError
from jackfield.units import in_units

TOKENS = 24  # three windows


@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4"])
@pytest.mark.parametrize(
    "family",
    ["llama", "llama-mqa", "gpt2", "gemma3", "mistral", "gpt-oss", "deepseek-v3", "mixtral"],
)
def test_planned_bytes_are_held_bytes(family: str, cache: str, steps: Any) -> None:
    model = build(family)
    planned = jackfield.plan(model, attn_implementation="eager", cache_implementation=cache)
    found = planned.memory()
    assert found is not None
    with jackfield.load(model, attn_implementation="eager", cache_implementation=cache) as engine:
        running = steps(engine, prompts((4,)), [TOKENS - 2], min_new_tokens=TOKENS - 2)
        held = 0
        for _ in range(TOKENS - 4):
            next(running)
            held = max(held, engine._loop.cache.held_bytes())
    assert found.request_bytes(TOKENS - 1) == held


def test_weights_of_a_config_are_counted_and_loaded_ones_are_not() -> None:
    model = build("llama", torch.float32)
    assert jackfield.plan(model).requirements.weight_bytes == 0
    expected = sum(p.numel() for p in model.parameters()) * 4
    assert jackfield.plan(config_of("llama"), dtype="float32").requirements.weight_bytes == expected


def test_how_much_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.planning.planning.free_bytes", lambda _: 10**9)
    plan = jackfield.plan("demo", cache_implementation="dynamic")
    found = plan.memory()
    needs = plan.requirements
    assert found.available == 10**9 - needs.weight_bytes
    assert found.bytes_per_token == sum(needs.kv_numbers) * 4
    assert found.requests(100) == found.available // (100 * found.bytes_per_token)
    assert found.longest == needs.context_length
    assert f"{found.bytes_per_token} bytes a token" in str(plan)
    assert plan.to_dict()["memory"]["longest_request"] == needs.context_length


def test_a_fixed_pool_is_what_there_is() -> None:
    found = jackfield.plan("demo", cache_implementation="paged?num_tokens=96").memory()
    assert found.longest == 96
    assert (found.requests(32), found.requests(33)) == (3, 1)


@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache"
)
def test_quantized_states_have_no_bytes_that_anybody_could_tell() -> None:
    plan = jackfield.plan("demo", cache_implementation="quantized?backend=fp8")
    assert plan.memory() is None
    assert plan.to_dict()["memory"] is None


def test_pools_by_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    home = "jackfield_plugins.cache.paged.free_bytes"
    selection = "paged?memory=0.5&page_size=4"
    with jackfield.load(build("llama"), cache_implementation="paged?page_size=4") as engine:
        page = engine.plan.memory().request_bytes(4)
    monkeypatch.setattr(home, lambda _: 20 * page + 1)
    with jackfield.load(build("llama"), cache_implementation=selection) as engine:
        assert engine._loop.cache.num_tokens == 40
        with pytest.raises(CacheFullError, match="num_tokens=48"):
            engine.generate(prompts((4,)), max_new_tokens=45)
    monkeypatch.setattr(home, lambda _: page)
    with pytest.raises(CacheFullError, match="less than one page"):
        jackfield.load(build("llama"), cache_implementation=selection)


@pytest.mark.parametrize(
    ("options", "says"),
    [("memory=0", "a share"), ("memory=1.5", "a share"), ("memory=0.5&num_tokens=64", "one of")],
)
def test_shares_are_checked(options: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        jackfield.plan("demo", cache_implementation=f"paged?{options}")


def test_free_memory_is_no_more_than_a_container_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert free_bytes("cpu") > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    assert free_bytes("cpu") == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes("cpu") > 5000


def test_units() -> None:
    assert [in_units(n) for n in (999, 1234567, 4 * 10**9)] == ["999 bytes", "1.2 MB", "4.0 GB"]
