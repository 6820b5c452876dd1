"""The paged cache: pages, windows, copy-on-write, exact bytes, and the same tokens as ever."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, WINDOW, build, oracle, prompts, references

import jackfield
from jackfield.errors import CacheFullError, PlanError
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
        assert len(store.groups[6].tables[1].pages) <= store.groups[6].pages_for(40, 1, 1)


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


def test_tables_are_made_anew_only_where_their_numbers_change() -> None:
    store, a = cache(), sequence(1, 3)
    store.commit(feed(store, (a, 3)), [3])
    seen = []
    for token in range(3, 6):
        a.tokens.append(token)
        step = feed(store, (a, 1))
        tables = store.groups[None]._now
        assert tables.block_table.tolist() == [tables.tables[0]]
        assert stored(store, 0) == list(range(token + 1))
        seen.append(tables.block_table)
        store.commit(step, [1])
    assert seen[0] is not seen[1]  # token 4 is the first of a page
    assert seen[1] is seen[2]


def test_bytes_are_exact() -> None:
    store, a = cache(num_tokens=40), sequence(1, 9)
    feed(store, (a, 9))
    assert store.num_bytes == 2 * 40 * 2 * 3 * 8  # keys and values, tokens, heads, size, float64


def allocated(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def test_64_ragged_rows_take_the_bytes_of_their_pages_and_less_than_padded(steps: Any) -> None:
    lengths, page_size = [16 + 6 * i for i in range(64)], 32
    batch = prompts(tuple(lengths))
    used = {}
    for name in ("paged", "dynamic"):
        with jackfield.load(
            "demo", cache_implementation=name, attn_implementation="sdpa", max_batch_size=64
        ) as engine:
            running = steps(engine, batch, [4] * 64, min_new_tokens=4)
            next(running), next(running)  # the prompts and one more token a row are cached
            store: Any = engine._loop.cache
            if name == "dynamic":
                used[name] = allocated(t for x in store._past.layers for t in (x.keys, x.values))
                continue
            (group,) = store.groups.values()
            pools = [t for layer in group.layers.values() for t in (layer.keys, layer.values)]
            used[name] = allocated(pools)
            assert store.num_bytes == used[name]
            pages = group.allocator.capacity
            held = pages - group.allocator.num_free
            config = engine.model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert held == sum(-(-(length + 1) // page_size) for length in lengths)
    assert pages == 512  # doubled from 64 as often as needed
    assert used == {
        "paged": pages * page_size * token,
        "dynamic": 64 * (max(lengths) + 1) * token,
    }
    assert held * page_size * token < used["paged"] < used["dynamic"]


def test_a_request_larger_than_the_cache_fails_by_name() -> None:
    with (
        jackfield.load(
            model_of("llama"), cache_implementation="paged?page_size=4&num_tokens=8"
        ) as engine,
        pytest.raises(jackfield.JackfieldError, match="num_tokens=15"),
    ):
        engine.generate(prompts((12,)), max_new_tokens=4)


@pytest.mark.parametrize(("family", "length"), [("llama", 4), ("mistral", 4), ("mistral", 20)])
@pytest.mark.parametrize("chunk", [None, 3])
def test_requests_that_fit_alone_wait_for_one_another(
    family: str, length: int, chunk: int | None
) -> None:
    expected = references(family, (length,) * 6, 9)
    with jackfield.load(
        model_of(family),
        cache_implementation="paged?page_size=4&num_tokens=28",
        prefill_chunk_size=chunk,
    ) as engine:
        found = engine.generate(prompts((length,) * 6), max_new_tokens=9)
        assert engine._loop.cache._claims == {}  # type: ignore[attr-defined]
    assert [completion.token_ids for completion in found] == expected


@pytest.mark.parametrize("window", [None, 1, 5, 8])
@pytest.mark.parametrize("chunk", [None, 1, 3, 50])
def test_a_sequence_never_holds_more_pages_than_it_claims(
    window: int | None, chunk: int | None
) -> None:
    for length in (1, 4, 13, 30):
        store = cache(window, num_tokens=400)
        store.prefill_chunk_size = chunk
        a, most = sequence(1, length), 0
        while True:
            (count,) = store.portions([a], chunk)
            step = feed(store, (a, count))
            most = max(most, len(store.groups[window].tables[1].pages))
            (claim,) = store._claims[1]
            store.commit(step, [count])
            if a.num_cached == length + SETTINGS.max_new_tokens - 1:
                break
            if a.num_cached == len(a.tokens):
                a.tokens.append(0)
        assert claim - 1 <= most <= claim


def test_what_waits_is_admitted_by_worst_case() -> None:
    store = cache(num_tokens=24)  # six pages; one sequence of 3 tokens comes to hold three
    waiting = [sequence(number, 3) for number in range(4)]
    assert store.room(waiting) == 2
    store.commit(feed(store, (waiting[0], 3)), [3])
    assert store.room(waiting[1:]) == 1
    store.commit(feed(store, (waiting[1], 3)), [3])
    assert store.room(waiting[2:]) == 0
    store.release(waiting[:1])
    assert store.room(waiting[2:]) == 1
    store.release(waiting)
    assert store.room([sequence(9, 90)]) == 1  # nothing runs: it fails in `prepare`, by name
    assert cache().room(waiting) is None


def test_a_prompt_that_a_window_takes_in_one_piece_is_refused_when_it_is_made() -> None:
    model, (prompt,) = model_of("mistral"), prompts((90,))
    selection = "paged?page_size=4&num_tokens=32"
    with (
        jackfield.load(model, cache_implementation=selection) as engine,
        pytest.raises(CacheFullError, match=r"need 90 places.*prefill_chunk_size.*num_tokens=90'"),
    ):
        engine.stream(prompt, max_new_tokens=3)
    with jackfield.load(model, cache_implementation=selection, prefill_chunk_size=8) as engine:
        (found,) = engine.generate(prompt, max_new_tokens=3)
    assert found.token_ids == oracle(model, prompt, 3)


def test_layers_that_share_keys_and_values_are_refused_by_name() -> None:
    config = transformers.Gemma3nTextConfig(
        vocab_size=97,
        vocab_size_per_layer_input=97,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_kv_shared_layers=2,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        activation_sparsity_pattern=[0.0] * 4,
    )
    with pytest.raises(PlanError, match="4 attention layers share the keys and values of 2"):
        jackfield.plan(config, attn_implementation="sdpa", cache_implementation="paged")
    assert jackfield.plan(config, attn_implementation="sdpa")


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


def test_an_attention_that_is_no_function_cannot_read_pages() -> None:
    model = build("gpt2")
    model.config.reorder_and_upcast_attn = True
    with pytest.raises(PlanError, match="GPT2LMHeadModel"):
        jackfield.load(model, attn_implementation="eager", cache_implementation="paged")


def test_a_mixed_step_counts_prefill_and_decode() -> None:
    with jackfield.load(model_of("llama"), cache_implementation="paged") as engine:
        first = engine.stream(prompts((4,))[0], max_new_tokens=4)
        next(first)
        second = engine.stream(prompts((6,))[0], max_new_tokens=2)
        next(second)
        seen = engine.report()["attention"]
    assert (seen.prefill[0], seen.decode[0]) == (2, 1)
