"""``offloaded`` and ``offloaded_static``: at most two layers on the device; refused on cpu.

Without CUDA, transformers' own offloading runs with streams that do nothing, and where each layer
is gets noted instead of moved: the order of its moves is shown, their speed is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from families import FAMILIES, build, config_of, oracle, prompts
from transformers.cache_utils import Cache, CacheLayerMixin

import jackfield
from jackfield.errors import PlanError
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

NAMES = ("offloaded", "offloaded_static")
LENGTHS = (3, 5, 12)
COUNTS = (2, 10, 5)
PROMPTS = prompts(LENGTHS)
TESTED = ("llama", "mistral", "gemma3", "gpt-oss")
LAYERS = 5


@pytest.fixture
def deep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of the family with more layers than may be on the device at once."""
    family = FAMILIES[request.param]
    arguments = {**family.arguments, "num_hidden_layers": LAYERS}
    if "layer_types" in arguments:
        arguments["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    monkeypatch.setitem(FAMILIES, "deep", replace(family, arguments=arguments))
    return build("deep")


def expected(model: Any) -> list[list[int]]:
    return [oracle(model, prompt, n) for prompt, n in zip(PROMPTS, COUNTS, strict=True)]


class NoStream(contextlib.nullcontext[None]):
    """A stream on which everything has happened already; `order` is what streams were given.

    An entry is ("waits", who, for whom), or a move and who makes it.
    """

    order: ClassVar[list[tuple[Any, ...]]] = []
    made: ClassVar[list[int]] = []  # the device that was current

    def __init__(self, name: str = "copies") -> None:
        self.name = name
        self.made.append(torch.cuda.current_device() if torch.cuda.is_available() else -1)
        super().__init__()

    def wait_stream(self, other: NoStream) -> None:
        self.order.append(("waits", self.name, other.name))


class Places:
    """Which layers are on the device, and how many of them there were at most."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.most = 0
        self.moves = 0

    def prefetch(self, layer: CacheLayerMixin) -> None:
        if layer.is_initialized:
            self.here.add(id(layer))
            NoStream.order.append(("prefetch", "copies", id(layer)))
        self.note()

    def offload(self, layer: CacheLayerMixin) -> None:
        self.here.add(id(layer))  # it has just been written
        NoStream.order.append(("offload", "default", id(layer)))
        self.note()
        self.here.discard(id(layer))
        self.moves += 1

    def note(self) -> None:
        self.most = max(self.most, len(self.here))


def noted(layer: CacheLayerMixin, note: Callable[[CacheLayerMixin], None]) -> None:
    note(layer)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Offloading on the cpu: the backends accept it, and moves are noted."""
    found = Places()
    monkeypatch.setattr(torch, "Stream", NoStream)
    default = NoStream("default")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(NoStream, "order", [])
    for move in ("prefetch", "offload"):
        monkeypatch.setattr(CacheLayerMixin, move, partialmethod(noted, getattr(found, move)))
    for name in NAMES:
        backend = registry().find("cache", parse(name)).backend
        monkeypatch.setattr(type(backend), "refuse", lambda *_: [])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", TESTED, indirect=True)
@pytest.mark.one_in(4)
def test_at_most_two_layers_are_on_the_device(deep: Any, name: str, places: Places) -> None:
    with jackfield.load(deep, cache_implementation=name) as engine:
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in COUNTS])
        assert places.moves == LAYERS * engine.report()["cache"].calls
    assert [completion.token_ids for completion in found] == expected(deep)
    assert places.most == 2


def update_of_5_17(
    cache: Cache, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """As it was up to transformers 5.19, where the stream of the copies waits for nothing."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer:
        cache.layers.append(cache.layer_class_to_replicate())
    torch.cuda.default_stream(keys.device).wait_stream(cache.prefetch_stream)
    cache.prefetch(layer + 1, cache.only_non_sliding)
    found: tuple[Any, Any] = cache.layers[layer].update(keys, values, *args, **kwargs)
    cache.offload(layer, cache.only_non_sliding)
    return found


def unordered(order: list[tuple[Any, ...]]) -> list[tuple[int, tuple[Any, ...]]]:
    """What a stream does without having waited for what the other one did with the same layer.

    A layer that comes back may take the memory of any other, so that waits for all that was done.
    """
    missing = []
    seen = {"copies": -1, "default": -1}  # up to where a stream waited for the other
    for at, (what, who, *layer) in enumerate(order):
        if what == "waits":
            seen[who] = at
            continue
        mine = layer if what == "offload" else []
        others = [
            i for i, (did, by, *its) in enumerate(order[:at])
            if did != "waits" and by != who and (not mine or its == mine)
        ]  # fmt: skip
        if others and seen[who] < others[-1]:
            missing.append((at, (what, who)))
    return missing


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", ["llama"], indirect=True)
def test_copies_wait_for_what_is_computed(
    deep: Any, name: str, old: bool, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(Cache, "update", update_of_5_17)
    reorder = Cache.reorder_cache

    def noted_reorder(cache: Cache, rows: Any) -> None:
        NoStream.order.append(("reorder", "default"))
        reorder(cache, rows)

    monkeypatch.setattr(Cache, "reorder_cache", noted_reorder)
    with jackfield.load(deep, cache_implementation=name) as engine:
        engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in COUNTS])
    moves = [entry[0] for entry in NoStream.order]
    assert {"prefetch", "offload", "reorder"} <= set(moves)
    assert unordered(NoStream.order) == []


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_made_on_the_device_of_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(NoStream, "made", [])
    FakeCuda([Gpu(), Gpu()]).install(monkeypatch)
    found = registry().find("cache", parse(name))
    context = SimpleNamespace(
        device=torch.device("cuda:1"), config=config_of("llama"), options=found.options()
    )
    found.backend.make(context, 8)  # type: ignore[attr-defined]
    assert NoStream.made == [1]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_where_there_is_nothing_to_offload_to(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.load("demo", cache_implementation=name, device_map="cpu")
    message = str(caught.value)
    assert f"{name} (there is no second device: the model on cpu" in message
    assert "use 'dynamic'" in message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to offload from")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", TESTED, indirect=True)
def test_layers_wait_in_main_memory(deep: Any, name: str, steps: Any) -> None:
    texts = expected(deep)
    with jackfield.load(deep.to("cuda"), cache_implementation=name) as engine:
        for tokens in steps(engine, PROMPTS, COUNTS):
            found = tokens
            past = engine._loop.cache._past  # type: ignore[attr-defined]
            if past is not None:
                torch.cuda.synchronize()
                assert sum(layer.keys.is_cuda for layer in past.layers) <= 2
    assert found == texts
