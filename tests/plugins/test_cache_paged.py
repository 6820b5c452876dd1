"""The paged cache: pages, windows, copy-on-write, exact bytes, and the same tokens as ever."""

from __future__ import annotations

import functools

import pytest
import torch
from families import FAMILIES, WINDOW, build, prompts, references

import jackfield
from jackfield.errors import PlanError
from jackfield.sequences import Feed, Sequence, Step
from jackfield.settings import Settings
from jackfield_plugins.cache.paged.pages import OutOfPagesError, PageAllocator
from jackfield_plugins.cache.paged.store import PagedKVCache

LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
SETTINGS = Settings(max_new_tokens=8)
model_of = functools.cache(build)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "falcon-alibi"])
def test_tokens_equal_the_oracle(family: str, attention: str, page_size: int) -> None:
    selection = f"paged?page_size={page_size}"
    model = model_of(family)
    if attention in FAMILIES[family].refused:
        with pytest.raises(PlanError, match=FAMILIES[family].refused[attention]):
            jackfield.plan(model, attn_implementation=attention, cache_implementation=selection)
        return
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(
        model, attn_implementation=attention, cache_implementation=selection
    ) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()
    assert [completion.token_ids for completion in found] == expected
    assert seen["cache"].name == "paged"
    assert set(seen["attention"].decode.values()) == {COUNT - 1}


def test_a_model_with_its_own_attention_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="FalconForCausalLM does not use transformers"):
        jackfield.plan(model_of("falcon-alibi"), cache_implementation="paged")


def cache(window: int | None = None, num_tokens: int | None = None) -> PagedKVCache:
    return PagedKVCache([window], 4, num_tokens, torch.device("cpu"))


def sequence(number: int, length: int) -> Sequence:
    return Sequence(number, list(range(length)), SETTINGS, None)


def feed(store: PagedKVCache, *parts: tuple[Sequence, int], drafts: tuple[int, ...] = ()) -> Step:
    """One step of every part's next `count` tokens; keys and values are the tokens' positions."""
    step = Step([Feed(s, s.num_cached, count, drafts) for s, count in parts])
    inputs = store.prepare(step)
    at = inputs.kwargs["position_ids"][0].double()[:, None, None].expand(-1, 2, 3)
    store.write(0, at, -at)
    return step


def stored(store: PagedKVCache, row: int) -> list[int]:
    keys, values = store.groups[next(iter(store.groups))].layers[0].gather(row)
    assert torch.equal(keys, -values)
    return keys[0, :, 0].int().tolist()


def test_pages_hold_what_was_written_and_are_given_back() -> None:
    store, a, b = cache(), sequence(1, 9), sequence(2, 5)
    step = feed(store, (a, 9), (b, 5))
    assert (stored(store, 0), stored(store, 1)) == (list(range(9)), list(range(5)))
    store.commit(step, [9, 5])
    allocator = store.groups[None].allocator
    assert allocator.capacity - allocator.num_free == 3 + 2
    store.release([a])
    store.release([a, b])
    assert allocator.num_free == allocator.capacity


def test_rejected_tokens_are_taken_back() -> None:
    store, a = cache(), sequence(1, 3)
    step = feed(store, (a, 3), drafts=(7, 7, 7))
    store.commit(step, [4])
    assert a.num_cached == 4
    assert len(store.groups[None].tables[1].pages) == 1


def test_a_window_keeps_only_its_pages() -> None:
    store, a = cache(window=6), sequence(1, 40)
    store.commit(feed(store, (a, 30)), [30])
    for _ in range(10):
        step = feed(store, (a, 1))
        assert stored(store, 0) == list(range(a.num_cached - 5, a.num_cached + 1))
        store.commit(step, [1])
        assert len(store.groups[6].tables[1].pages) <= store.groups[6].pages_for(40)


def test_a_fork_shares_pages_until_one_writes() -> None:
    store, a, b = cache(), sequence(1, 6), sequence(2, 8)
    store.commit(feed(store, (a, 6)), [6])
    free = store.groups[None].allocator.num_free
    store.fork(a, b)
    assert (b.num_cached, store.groups[None].allocator.num_free) == (6, free)
    a.tokens.append(6)
    step = feed(store, (a, 1), (b, 2))
    assert (stored(store, 0), stored(store, 1)) == (list(range(7)), list(range(8)))
    store.commit(step, [1, 2])
    assert store.groups[None].tables[1].pages[0] == store.groups[None].tables[2].pages[0]
    assert store.groups[None].tables[1].pages[1] != store.groups[None].tables[2].pages[1]
    store.release([a, b])
    assert store.groups[None].allocator.num_free == store.groups[None].allocator.capacity


def test_pools_grow_and_keep_what_they_hold() -> None:
    store, a = cache(), sequence(1, 600)
    store.commit(feed(store, (a, 200)), [200])
    step = feed(store, (a, 400))
    assert stored(store, 0) == list(range(600))
    store.commit(step, [400])


def test_bytes_are_exact() -> None:
    store, a = cache(num_tokens=40), sequence(1, 9)
    feed(store, (a, 9))
    assert store.num_bytes == 2 * 40 * 2 * 3 * 8  # keys and values, tokens, heads, size, float64


def test_a_request_larger_than_the_cache_fails_by_name() -> None:
    with (
        jackfield.load(
            model_of("llama"), cache_implementation="paged?page_size=4&num_tokens=8"
        ) as engine,
        pytest.raises(jackfield.JackfieldError, match="num_tokens=15"),
    ):
        engine.generate(prompts((12,)), max_new_tokens=4)


def test_allocator_counts_holders() -> None:
    allocator = PageAllocator(3)
    pages = [allocator.take(None)]
    pages += [allocator.take(pages[-1]), allocator.take(None)]
    assert sorted(pages) == [0, 1, 2]
    with pytest.raises(OutOfPagesError):
        allocator.take(None)
    allocator.share([0])
    allocator.release([0])
    assert not allocator.is_shared(0)
    allocator.release(pages)
    assert allocator.num_free == 3
    with pytest.raises(ValueError, match="more often"):
        allocator.release([0])
