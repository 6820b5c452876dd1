"""``offloaded`` and ``offloaded_static``: at most two layers on the device; refused on cpu.

Without CUDA, transformers' own offloading runs with streams that do nothing, and where each layer
is gets noted instead of moved: the order of its moves is shown, their speed is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from families import FAMILIES, build, oracle, prompts
from transformers.cache_utils import CacheLayerMixin

import jackfield
from jackfield.choosing.discovery import registry
from jackfield.choosing.selection import parse
from jackfield.errors import PlanError

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
    """A stream on which everything has happened already."""

    def wait_stream(self, other: NoStream) -> None:
        pass


class Places:
    """Which layers are on the device, and how many of them there were at most."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.most = 0
        self.moves = 0

    def prefetch(self, layer: CacheLayerMixin) -> None:
        if layer.is_initialized:
            self.here.add(id(layer))
        self.note()

    def offload(self, layer: CacheLayerMixin) -> None:
        self.here.add(id(layer))  # it has just been written
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
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
    for move in ("prefetch", "offload"):
        monkeypatch.setattr(CacheLayerMixin, move, partialmethod(noted, getattr(found, move)))
    for name in NAMES:
        backend = registry().find("cache", parse(name)).backend
        monkeypatch.setattr(type(backend), "refuse", lambda *_: [])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", TESTED, indirect=True)
def test_at_most_two_layers_are_on_the_device(deep: Any, name: str, places: Places) -> None:
    with jackfield.load(deep, cache_implementation=name) as engine:
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in COUNTS])
        assert places.moves == LAYERS * engine.report()["cache"].calls
    assert [completion.token_ids for completion in found] == expected(deep)
    assert places.most == 2


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
