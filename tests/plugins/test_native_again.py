"""Layers are asked for their native calls once, as long as only the tables of a step change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from families import build, prompts

import jackfield
from jackfield.bridge.native_attention import NativeAttention
from jackfield_plugins.cache.paged.store import PagedKVCache


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each layer is asked."""
    found: Counter[int] = Counter()
    whole = NativeAttention.calls

    def calls(self: Any, number: int, *rest: Any) -> Any:
        found[number] += 1
        return whole(self, number, *rest)

    monkeypatch.setattr(NativeAttention, "calls", calls)
    return found


def said(family: str, cache: str, lengths: tuple[int, ...], new: int, compiler: str) -> Any:
    with jackfield.load(
        build(family), cache_implementation=cache, compile=compiler, max_batch_size=4
    ) as engine:
        found = engine.generate(prompts(lengths), max_new_tokens=new, eos_token_id=[])
        return [one.token_ids for one in found]


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # gemma3: two windows, so two groups
def test_a_long_text_asks_once(family: str, asked: Counter[int]) -> None:
    cache = "paged?num_tokens=2048&page_size=4"
    found = said(family, cache, (5, 9, 3), 40, "native")
    assert set(asked.values()) == {1}
    assert found == said(family, cache, (5, 9, 3), 40, "none")


def test_pools_that_have_grown_are_asked_for_again(asked: Counter[int]) -> None:
    def run(compiler: str) -> list[Any]:
        with jackfield.load(
            build("llama"), cache_implementation="paged?page_size=1", compile=compiler
        ) as engine:
            return [
                engine.generate(prompts((5,)), max_new_tokens=new, eos_token_id=[])[0].token_ids
                for new in (4, 80, 100)
            ]

    found = run("native")
    assert asked[0] == 2
    assert found == run("none")


def test_sizes_that_take_turns(asked: Counter[int]) -> None:
    """Two, one and three sequences by turns; 3 of 4 rows are filled up in the last."""
    texts = prompts((5, 9, 3))

    def run(compiler: str) -> list[Any]:
        with jackfield.load(
            build("llama"), cache_implementation="paged?num_tokens=2048", compile=compiler
        ) as engine:
            return [
                [one.token_ids for one in engine.generate(some, max_new_tokens=6, eos_token_id=[])]
                for some in (texts[:2], texts[:1], texts, texts[:2], texts[:1])
            ]

    found = run("native")
    assert asked[0] == 5
    assert found == run("none")


def test_a_cache_whose_calls_do_not_hold_is_asked_in_each_step(
    asked: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = said("llama", "paged?num_tokens=2048", (5,), 8, "native")
    asked.clear()
    monkeypatch.setattr(PagedKVCache, "native_again", lambda self, tokens: False)
    assert said("llama", "paged?num_tokens=2048", (5,), 8, "native") == expected
    assert asked[0] == 7
