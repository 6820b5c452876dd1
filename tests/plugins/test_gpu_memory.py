"""Pools: made with the engine, by the memory of its own GPU, and gone when it closes."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from families import FAMILIES, build, config_of, prompts

import jackfield
from jackfield.bridge.devices import settle
from jackfield.bridge.dry_run import DryRun
from jackfield.devices import free_bytes, numbered
from jackfield.engine import assembly
from jackfield.errors import CacheFullError, JackfieldError
from jackfield.estimates import measuring
from jackfield.planning.memory import STEP_ROWS, STEP_TOKENS, StepLimits, step_bytes
from jackfield.registry.discovery import registry
from jackfield.spelling import parse
from jackfield_plugins.cache import paged
from jackfield_plugins.cache.paged.store import PagedKVCache

GB = 10**9


def pools(engine: jackfield.Engine) -> list[torch.Tensor]:
    cache: Any = engine._bound.cache
    layers = [layer for group in cache.groups.values() for layer in group.pools.layers.values()]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def test_free_is_what_the_driver_says_once_torch_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Gpu(free=5 * GB, reserved=40 * GB, allocated=16 * GB, between=3 * GB)
    cuda = FakeCuda([Gpu(free=9 * GB), left]).install(monkeypatch)
    assert [free_bytes(d) for d in ("cuda", "cuda:0", "cuda:1")] == [9 * GB, 9 * GB, 26 * GB]
    with cuda.device(1):
        assert free_bytes("cuda") == 26 * GB


def test_an_engine_that_ends_hands_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was not made."""
    handed: list[str] = []
    monkeypatch.setattr(assembly, "hand_back", handed.append)
    jackfield.load("demo").close()
    assert handed == ["cpu"]
    monkeypatch.setattr(assembly, "Worker", None)
    with pytest.raises(TypeError):
        jackfield.load("demo")
    assert handed == ["cpu", "cpu"]


def packable() -> list[str]:
    """The families whose pools are known before they run."""
    found = []
    for name in FAMILIES:
        try:
            plan = jackfield.plan(config_of(name), cache_implementation="paged?num_tokens=96")
        except JackfieldError:
            continue
        if plan.memory() is not None:
            found.append(name)
    return found


def test_pools_are_made_at_once_and_used() -> None:
    """For every family: no tensor is made in the first step, and there are the bytes planned."""
    names = packable()
    assert len(names) > 10
    for name in names:
        model, cache = build(name, torch.float32), "paged?num_tokens=96&page_size=8"
        with jackfield.load(model, cache_implementation=cache) as engine:
            made = pools(engine)
            planned = engine.plan.memory()
            assert planned is not None
            assert sum(t.nbytes for t in made) == planned.available > 0, name
            engine.generate(prompts((3, 5)), max_new_tokens=2)
            assert [t.data_ptr() for t in pools(engine)] == [t.data_ptr() for t in made], name
            assert any(bool(t.any()) for t in made), name


def test_a_dtype_that_nobody_expected_makes_the_pool_anew() -> None:
    model = build("llama", torch.float32)
    with jackfield.load(model, cache_implementation="paged?num_tokens=64") as engine:
        cache: Any = engine._bound.cache
        group = next(iter(cache.groups.values()))
        layer, keys = group.pools.layers[0], torch.ones(1, *pools(engine)[0].shape[2:]).double()
        group.targets, group.now = torch.zeros(1, dtype=torch.long), layer.tables
        assert group.write(0, keys, keys).keys.dtype == torch.float64
        assert layer.keys.numel() == 0


@pytest.mark.parametrize("cache", ["paged", "paged?num_tokens=96&swap=true", "dynamic", "static"])
@pytest.mark.parametrize("live", [False, True])
def test_nothing_keeps_pools_of_a_closed_engine(cache: str, live: bool) -> None:
    """Also while the engine, its requests and the model live on."""
    model: Any = build("llama", torch.float32) if live else "demo"
    engine = jackfield.load(model, cache_implementation=cache)
    kept = engine.submit(prompts((4,))[0], max_new_tokens=4)
    kept.result()
    if cache.startswith("paged"):
        held = [weakref.ref(t) for t in pools(engine)]
    else:
        running = engine.submit(prompts((4,))[0], max_new_tokens=100, min_new_tokens=100)
        next(iter(running))
        held = [weakref.ref(engine._bound.cache._past)]  # type: ignore[attr-defined]
    assert held
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    usage = engine.statistics().cache
    assert usage is None or usage.num_bytes == 0


def test_nor_those_of_a_draft_model() -> None:
    engine = jackfield.load("demo", decoding="assisted", assistant_model="demo")
    engine.generate(prompts((4,)), max_new_tokens=4)
    own = [cache for cache in gc.get_objects() if type(cache) is PagedKVCache]
    held = [
        weakref.ref(layer.keys)
        for cache in own for group in cache.groups.values() for layer in group.pools.layers.values()
    ]  # fmt: skip
    assert len([cache for cache in own if cache.num_bytes]) == 2
    engine.close()
    gc.collect()
    assert not any(ref() is not None for ref in held)


@pytest.fixture
def full_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A device of so many bytes; what is free of it is what no pool has."""
    total = 1_000_000

    def free(_: str) -> int:
        return total - sum(c.num_bytes for c in gc.get_objects() if type(c) is PagedKVCache)

    monkeypatch.setattr(paged, "free_bytes", free)
    gc.collect()
    return total


def size_of(engine: jackfield.Engine) -> int:
    return sum(t.nbytes for t in pools(engine))


def test_the_next_engine_gets_what_the_first_one_got(full_device: int) -> None:
    found, engines = [], []
    for _ in range(3):
        engine = jackfield.load(build("llama"), cache_implementation="paged?memory=0.9")
        engine.generate(prompts((4,)), max_new_tokens=2)
        found.append(size_of(engine))
        engine.close()
        engines.append(engine)  # somebody still has it
    assert found == [found[0]] * 3
    assert 0.85 * full_device < found[0] <= 0.9 * full_device


def test_two_engines_side_by_side_say_what_each_has(
    full_device: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jackfield")
    with jackfield.load(build("llama"), cache_implementation="paged?memory=0.9") as first:
        assert "beside" not in caplog.text
        with jackfield.load(build("llama"), cache_implementation="paged?memory=0.9") as second:
            assert size_of(second) <= 0.9 * (full_device - size_of(first))
        (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "for another engine of this process" in told
        assert "'paged?memory=0.45'" in told
        with pytest.raises(CacheFullError, match=r"less than one page .* for another engine"):
            jackfield.load(build("llama"), cache_implementation="paged?memory=0.0001")
    with (
        jackfield.load(build("llama"), cache_implementation="paged?memory=0.45") as first,
        jackfield.load(build("llama"), cache_implementation="paged?memory=0.8") as second,
    ):
        assert size_of(second) == pytest.approx(size_of(first), rel=0.05)


def context_of(plan: Any, device: str, memory_share: float = 1.0) -> Any:
    return SimpleNamespace(
        requirements=plan.requirements,
        options=plan["cache"].options,
        device=torch.device(device),
        step_bytes=plan.step_bytes(),
        memory_share=memory_share,
        max_chunk_size=None,
        free=None,
    )


def bound(context: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The paged cache for a device that is not there, without its tensors."""
    monkeypatch.setattr(PagedKVCache, "allocate", lambda *_: None)
    return registry().find("cache", parse("paged")).backend.bind(context)


def test_the_pool_is_sized_by_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Gpu(free=50 * GB, reserved=12 * GB, allocated=2 * GB)
    FakeCuda([Gpu(free=GB), there]).install(monkeypatch)
    plan = jackfield.plan(config_of("llama"), dtype="bfloat16", device_map="cuda:1")
    context = context_of(plan, "cuda:1")
    cache = bound(context, monkeypatch)
    page = sum(plan.requirements.packed_numbers) * 2 * cache.page_size
    assert context.step_bytes > 0
    assert cache.num_tokens // cache.page_size == int(0.9 * (60 * GB - context.step_bytes)) // page
    half = bound(context_of(plan, "cuda:1", 0.5), monkeypatch)
    assert half.num_tokens == pytest.approx(cache.num_tokens / 2, rel=1e-3)


def test_estimates_are_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device elsewhere, by the plan before weights are read, and when it is bound."""
    config = config_of("llama")
    given: Any = {"dtype": "bfloat16", "device_map": "cuda", "attn_implementation": "sdpa"}
    elsewhere = jackfield.estimate(config, device_memory=2 * GB, **given)
    weights = elsewhere.weight_bytes
    FakeCuda([Gpu(free=2 * GB)]).install(monkeypatch)
    plan = jackfield.plan(config, **given)
    memory = plan.memory()
    assert memory is not None
    assert elsewhere.pool == memory.available > 0
    FakeCuda([Gpu(free=2 * GB - weights)]).install(monkeypatch)
    context = context_of(plan, "cuda:0")
    cache = bound(context, monkeypatch)
    assert cache.num_tokens * sum(plan.requirements.packed_numbers) * 2 == memory.available
    assert memory.available + context.step_bytes + weights <= 2 * GB


def test_what_is_left_for_a_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a dry run takes, for every family, and not many times as much."""
    FakeCuda().install(monkeypatch)
    shares = []
    for name in packable():
        config = config_of(name)
        needs = jackfield.plan(
            config, dtype="bfloat16", device_map="cuda", attn_implementation="eager",
            cache_implementation="paged?num_tokens=4096",
        ).requirements  # fmt: skip
        tokens = min(STEP_TOKENS, needs.context_length or STEP_TOKENS)
        dry = DryRun(config, needs, materializes_scores=False)
        prompt, decode = dry.activations(tokens, tokens), dry.activations(1, 2, STEP_ROWS)
        if prompt is None or decode is None:
            continue
        left = step_bytes(needs, StepLimits(tokens, STEP_ROWS))
        assert left >= max(prompt, decode), (name, left, prompt, decode)
        shares.append((left / max(prompt, decode), name))
    assert len(shares) > 10
    assert max(shares)[0] < 12, max(shares)


def test_a_draft_model_leaves_the_room_that_steps_of_both_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever binds first: beside both pools there is room for a step of each, and a tenth more."""
    monkeypatch.setattr(PagedKVCache, "allocate", lambda *_: None)
    drafting = build("llama", torch.bfloat16)
    for cache in ("paged", "paged?num_tokens=50000"):
        FakeCuda([Gpu(free=2 * GB)]).install(monkeypatch)
        given: Any = {"dtype": "bfloat16", "device_map": "cuda:0", "cache_implementation": cache}
        plan = jackfield.plan(
            config_of("llama"), decoding="assisted", assistant_model=drafting.config, **given,
        )  # fmt: skip
        draft = plan.assistant
        assert draft is not None
        steps = plan.step_bytes() + draft.step_bytes()
        pools: list[int] = []
        for one in (plan, draft):
            room = plan.room() if one is plan else plan.room_beside(pools[0])
            assert room[0] == steps
            context = context_of(one, "cuda:0", room[1])
            context.step_bytes = room[0]
            made = registry().find("cache", parse("paged")).backend.bind(context)
            pools.append(made.num_tokens * plan_bytes(one))
            FakeCuda([Gpu(free=2 * GB - sum(pools))]).install(monkeypatch)
        left = 2 * GB - sum(pools)
        assert left >= steps + 0.09 * (2 * GB - steps) * (cache == "paged"), (left, steps, pools)
        tokens = [pool / plan_bytes(one) for pool, one in zip(pools, (plan, draft), strict=True)]
        if cache == "paged":
            assert tokens[1] == pytest.approx(tokens[0], rel=0.01)
        else:
            assert tokens[1] >= 0.9 * tokens[0]


def test_a_models_own_first_layers_take_room_for_steps_and_tokens_and_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda([Gpu(free=2 * GB)]).install(monkeypatch)
    given: Any = {"dtype": "bfloat16", "device_map": "cuda:0", "cache_implementation": "paged"}
    plan = jackfield.plan(config_of("llama"), decoding="assisted?assistant_early_exit=1", **given)
    draft = plan.assistant
    assert draft is not None
    assert (draft.device, draft.requirements.device) == ("cuda:0", "cuda")
    assert draft._loading("cuda:0") == 0
    steps, share = plan.room()
    assert steps == plan.step_bytes() + draft.step_bytes()
    assert share == pytest.approx(2 / 3)  # two layers of three
    alone = jackfield.plan(config_of("llama"), decoding="prompt_lookup", **given)
    assert plan._loading("cuda:0") == alone._loading("cuda:0")


@pytest.mark.parametrize("current", [0, 1])
def test_a_gpu_has_one_name(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a model and its draft model say where they are, they share what is there."""
    FakeCuda([Gpu(free=2 * GB), Gpu(free=3 * GB)], current=current).install(monkeypatch)
    plans = {
        name: jackfield.plan(
            config_of("llama"), dtype="bfloat16", device_map=name, cache_implementation="paged",
            decoding="assisted", assistant_model=config_of("llama"),
        )
        for name in ("cuda", "cuda:0", "cuda:1")
    }  # fmt: skip
    here = f"cuda:{current}"
    other = f"cuda:{1 - current}"
    assert [numbered(name) for name in ("cuda", here, other, "cpu", None)] == [
        here, here, other, "cpu", "cpu",
    ]  # fmt: skip
    for mine, theirs in itertools.product(plans, repeat=2):
        pair = replace(plans[mine], assistant=plans[theirs].assistant)
        together = numbered(mine) == numbered(theirs)
        steps = plans[mine].step_bytes()
        assert plans[theirs].assistant is not None
        assert pair.room()[0] == steps + together * plans[theirs].assistant.step_bytes()
        if together:
            assert pair.room_beside(1000)[0] == pair.room()[0]
        weights = {name: pair._loading(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu")}
        loaded = pair.requirements.weight_bytes
        assert weights == {name: loaded * (numbered(name) == numbered(mine)) for name in weights}


def plan_bytes(plan: Any) -> int:
    """Of a token's keys and values."""
    return sum(plan.requirements.packed_numbers) * (4 if "32" in plan.requirements.dtype else 2)


def test_room_for_a_step_is_by_the_limits_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda([Gpu(free=2 * GB)]).install(monkeypatch)
    given: Any = {"dtype": "bfloat16", "device_map": "cuda:0", "attn_implementation": "sdpa"}
    plan = jackfield.plan(config_of("llama"), **given)
    usual, memory = plan.step_bytes(), plan.memory()
    for tokens, rows in ((8192, 32), (2048, 512), (64, 2)):
        own = plan.limited(tokens, rows)
        assert own.step_bytes() == step_bytes(plan.requirements, StepLimits(tokens, rows))
        told = own.memory()
        assert told is not None
        assert memory is not None
        less = 0.9 * (own.step_bytes() - usual)
        page = sum(plan.requirements.packed_numbers) * 2 * 32
        assert memory.available - told.available == pytest.approx(less, abs=page)
    drafts = jackfield.plan(
        config_of("llama"), decoding="prompt_lookup?prompt_lookup_num_tokens=7", **given
    )
    assert drafts.step_bytes() == step_bytes(drafts.requirements, StepLimits(drafts=7))


def test_an_engine_plans_with_its_limits() -> None:
    with jackfield.load("demo", max_batch_size=3, max_batch_tokens=77) as engine:
        assert engine.plan.limits == StepLimits(77, 3)


def test_binding_ends_when_its_streams_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are made on the stream of whoever loads, and steps run on another one."""
    told: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: told.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: told.append(device) or stream)
    there = torch.device("cuda:1")
    tensors = [SimpleNamespace(device=d) for d in (there, there, torch.device("cpu"))]
    settle(SimpleNamespace(parameters=lambda: tensors))  # type: ignore[arg-type]
    assert told == [there, "waited"]
    seen: list[Any] = []

    def settling(model: Any) -> None:
        assert pools_made() == 2
        seen.append(model)

    def pools_made() -> int:
        return len([c for c in gc.get_objects() if type(c) is PagedKVCache and c.num_bytes])

    gc.collect()
    monkeypatch.setattr(assembly, "settle", settling)
    started: list[int] = []
    worker = assembly.Worker
    monkeypatch.setattr(assembly, "Worker", lambda *a: started.append(len(seen)) or worker(*a))
    model, draft = build("llama"), build("llama")
    cache = "paged?num_tokens=64"
    with jackfield.load(
        model, cache_implementation=cache, decoding="assisted", assistant_model=draft,
        assistant={"cache_implementation": cache},
    ):  # fmt: skip
        assert seen == [model, draft]
        assert started == [2]


def test_memory_is_measured_on_the_gpus_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda([Gpu(allocated=1), Gpu(allocated=20), Gpu(allocated=300)]).install(monkeypatch)
    peaks, reset = {"cuda:0": 7, "cuda:1": 70, "cuda:2": 700}, []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d=None: peaks[d or "cuda:0"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d=None: reset.append(d))
    for devices, peak in (
        (("cuda:1",), 50),
        (("cuda:0",), 6),
        (("cuda:2", "cuda:1", "cpu"), 450),
    ):
        reset.clear()
        assert measuring.Meter(devices).peak() == peak
        assert reset == [d for d in devices if d != "cpu"]
