"""A stranger's packed cache that refuses nothing itself: equal or refused, on every family."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, MORE_FAMILIES, STATES_APART, WINDOW, build, prompts, references
from samples import sampled

import jackfield
from jackfield.contracts import BindContext, Cache, CacheCapabilities, KVCache, Requirements
from jackfield.errors import PlanError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.cache.paged.store import PagedKVCache

LENGTHS = (WINDOW - 2, 3 * WINDOW, 1)
COUNT = WINDOW
ALL = (*FAMILIES, *MORE_FAMILIES)
NOT_PACKED = {
    "falcon-alibi": "needs its own attention",
    "bloom": "needs its own attention",
    "diffllama": "a layer's attention is called 2 times a step",
    "hrm-text": "a prefix that is read in both directions",
    "llama4": "does not hold chunked_attention layers",
    **dict.fromkeys(
        () if STATES_APART else ("lfm2", "qwen3-next"), "cannot keep the state of linear"
    ),
}


class Careless(Cache):
    """Does what a packed cache must do, and asks nothing about the model."""

    name = "careless"
    capabilities = CacheCapabilities(
        layout="packed", layer_types=frozenset({"full_attention", "sliding_attention"})
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return []

    def bind(self, context: BindContext) -> KVCache:
        return PagedKVCache(context.requirements.windows, 4, None, context.device)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> str:
    mine = Registered(Careless(), "stranger", "1.0", "careless-ep")
    known = registry().backends["cache"]
    monkeypatch.setitem(registry().backends, "cache", [*known, mine])
    return "plugin:careless"


@pytest.mark.parametrize("family", sampled([name for name in ALL if name not in NOT_PACKED], 4))
def test_what_it_is_given_is_right(family: str, careless: str) -> None:
    with jackfield.load(build(family), cache_implementation=careless) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        assert engine.report()["cache"].name == "careless"
    assert [c.token_ids for c in found] == references(family, LENGTHS, COUNT)


@pytest.mark.parametrize("family", NOT_PACKED)
def test_what_no_packed_cache_holds_is_refused_for_it(family: str, careless: str) -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(build(family), cache_implementation=careless)
    assert "careless (" in str(caught.value)
    assert NOT_PACKED[family] in str(caught.value)


def test_a_packed_layer_describes_no_chunks_and_no_state() -> None:
    for layer_type in ("chunked_attention", "linear_attention"):
        with pytest.raises(ValueError, match="unknown layer type of the packed layout"):
            CacheCapabilities(layout="packed", layer_types=frozenset({layer_type}))
