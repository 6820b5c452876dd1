"""The paged cache: pages, windows, copy-on-write, exact bytes, and the same tokens as ever."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from families import FAMILIES, WINDOW, build, oracle, prompts, references
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield
from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step
from jackfield.errors import CacheFullError, ExecutionError, PlanError
from jackfield_plugins.cache.paged.groups import LayerGroup
from jackfield_plugins.cache.paged.pages import OutOfPagesError, PageAllocator
from jackfield_plugins.cache.paged.room import Room
from jackfield_plugins.cache.paged.store import PagedKVCache

LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
SETTINGS = Settings(max_new_tokens=8)
model_of = functools.cache(build)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "falcon-alibi"])
@pytest.mark.one_in(4)
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


def cache(window: int | None = None, num_tokens: int | None = None, **more: bool) -> PagedKVCache:
    return PagedKVCache([window], 4, num_tokens, torch.device("cpu"), **more)


def sequence(number: int, length: int) -> Sequence:
    return Sequence(number, list(range(length)), SETTINGS)


def feed(store: PagedKVCache, *parts: tuple[Sequence, int], drafts: tuple[int, ...] = ()) -> Step:
    """One step of every part's next `count` tokens; keys and values are the tokens' positions."""
    step = Step([ScheduledSequence(s, s.num_cached, count, drafts) for s, count in parts])
    inputs = store.prepare(step)
    at = inputs.kwargs["position_ids"][0].double()[:, None, None].expand(-1, 2, 3)
    store.write(0, at, -at)
    return step


def stored(store: PagedKVCache, row: int) -> list[int]:
    keys, values = store.groups[next(iter(store.groups))].pools.layers[0].gather(row)
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
    store.fork([(a, b)], [])
    assert (b.num_cached, store.groups[None].allocator.num_free) == (6, free)
    list.append(a.tokens, 6)
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
        list.append(a.tokens, token)
        step = feed(store, (a, 1))
        tables = store.groups[None].now
        assert tables.block_table.tolist() == [list(tables.tables[0])]
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


@pytest.mark.long
def test_64_ragged_rows_take_the_bytes_of_their_pages_and_less_than_padded(steps: Any) -> None:
    lengths, page_size = [16 + 6 * i for i in range(64)], 32
    batch = prompts(tuple(lengths))
    used = {}
    for name in ("paged", "dynamic"):
        bound = {"max_batch_tokens": sum(lengths)} if name == "paged" else {}
        with jackfield.load(
            "demo",
            cache_implementation=name,
            attn_implementation="sdpa",
            max_batch_size=64,
            **bound,
        ) as engine:
            running = steps(engine, batch, [4] * 64, min_new_tokens=4)
            next(running), next(running)  # the prompts and one more token a row are cached
            store: Any = engine._loop.cache
            if name == "dynamic":
                used[name] = allocated(t for x in store._past.layers for t in (x.keys, x.values))
                continue
            (group,) = store.groups.values()
            pools = [t for layer in group.pools.layers.values() for t in (layer.keys, layer.values)]
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
def test_requests_that_fit_alone_make_room_for_one_another(
    family: str, length: int, chunk: int | None
) -> None:
    expected = references(family, (length,) * 6, 9)
    with jackfield.load(
        model_of(family),
        cache_implementation="paged?page_size=4&num_tokens=28",
        prefill_chunk_size=chunk,
    ) as engine:
        found = engine.generate(prompts((length,) * 6), max_new_tokens=9)
        assert engine._loop.cache._running == {}  # type: ignore[attr-defined]
    assert [completion.token_ids for completion in found] == expected


@pytest.mark.parametrize("window", [None, 1, 5, 8])
@pytest.mark.parametrize("chunk", [None, 1, 3, 50])
def test_a_sequence_holds_as_many_pages_as_were_foreseen(
    window: int | None, chunk: int | None
) -> None:
    for length in (1, 4, 13, 30):
        store = cache(window, num_tokens=400)
        a, most = sequence(1, length), 0
        assert store.admit(a)
        while True:
            left = len(a.tokens) - a.num_cached
            (count,) = store.adjust_schedule([a], [min(left, chunk or left)])
            step = feed(store, (a, count))
            most = max(most, len(store.groups[window].tables[1].pages))
            store.commit(step, [count])
            if a.num_cached == length + SETTINGS.max_new_tokens - 1:
                break
            if a.num_cached == len(a.tokens):
                list.append(a.tokens, 0)
        foreseen = store.groups[window].pages_for(a.num_cached, length, chunk)
        assert foreseen - 1 <= most <= foreseen


def test_one_enters_when_what_it_has_fits_beside_what_the_others_may_take_next() -> None:
    store = cache(num_tokens=24)  # six pages
    waiting = [sequence(number, 3) for number in range(4)]
    assert [store.admit(s) for s in waiting] == [True, True, True, False]
    step = feed(store, *((s, 3) for s in waiting[:3]))
    assert store.fits(step)
    store.commit(step, [3, 3, 3])
    assert not store.admit(waiting[3])
    store.release(waiting[:1])
    assert store.admit(waiting[3])
    store.release(waiting)
    assert store.admit(sequence(9, 90))  # nothing runs: it was refused when it was made
    assert all(map(cache().admit, waiting))


def test_whoever_enters_costs_the_same_however_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What those that run are owed is counted once, not for each that enters beside them."""
    counted = []
    missing = LayerGroup.missing
    monkeypatch.setattr(
        LayerGroup, "missing", lambda *given: (counted.append(given), missing(*given))[1]
    )
    store = cache(num_tokens=1 << 16)
    assert all(store.admit(sequence(n, 9)) for n in range(300))
    assert len(counted) < 300
    store.commit(feed(store, *((s, 9) for s in store._running.values())), [9] * 300)
    counted.clear()
    assert all(store.admit(sequence(n, 9)) for n in range(300, 400))
    assert len(counted) < 400


def of_now(store: PagedKVCache) -> list[int]:
    """What those that run are owed, counted anew."""
    running = dict(store._running)
    return list(Room(store.groups.values(), store.num_tokens, running, None)._owed())


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "feed", "preempt", "release", "fork", "truncate"]),
                  st.integers(0, 20), st.integers(1, 14)),
        max_size=40),
    st.sampled_from([None, 6]), st.booleans())  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_what_is_owed_is_what_counting_it_anew_says(
    acts: list[tuple[str, int, int]], window: int | None, sharing: bool
) -> None:
    store = cache(window, num_tokens=240, prefix_sharing=sharing)
    for number, (what, which, size) in enumerate(acts):
        running = list(store._running.values())
        one = running[which % len(running)] if running else None
        if what == "enter":
            store.admit(sequence(number, size))
        elif one is None:
            continue
        elif what == "feed":
            parts = [(s, len(s.tokens) - s.num_cached) for s in running]
            step = Step([ScheduledSequence(s, s.num_cached, n, ()) for s, n in parts])
            if store.fits(step):
                write_step(store, step)
                store.commit(step, [n for _, n in parts])
                for s in running:
                    list.append(s.tokens, 1)
        elif what == "preempt":
            store.preempt(one)
        elif what == "release":
            store.release([one])
        elif what == "fork" and one.num_cached:
            copy = Sequence(1000 + number, one.tokens, SETTINGS)
            store.fork([(one, copy)], [])
        elif what == "truncate" and one.num_cached > size:
            store.truncate(one, one.num_cached - size)
        assert store._room._owed() == of_now(store)


def write_step(store: PagedKVCache, step: Step) -> None:
    inputs = store.prepare(step)
    at = inputs.kwargs["position_ids"][0].double()[:, None, None].expand(-1, 2, 3)
    store.write(0, at, -at)


def test_a_step_fits_as_long_as_there_are_pages() -> None:
    store = cache(num_tokens=12)
    a, b = sequence(1, 4), sequence(2, 8)
    assert store.admit(a)
    step = feed(store, (a, 4))
    store.commit(step, [4])
    assert store.fits(Step([ScheduledSequence(a, 4, 4), ScheduledSequence(b, 0, 4)]))
    assert not store.fits(Step([ScheduledSequence(a, 4, 4), ScheduledSequence(b, 0, 5)]))
    assert not store.fits(
        Step([ScheduledSequence(a, 4, 1, (1, 2, 3, 4)), ScheduledSequence(b, 0, 4)])
    )


def write(store: PagedKVCache, s: Sequence) -> None:
    """Feed all that is left of a sequence."""
    assert store.admit(s)
    left = len(s.tokens) - s.num_cached
    store.commit(feed(store, (s, left)), [left])


@pytest.mark.parametrize("window", [None, 6])
def test_a_prompt_that_begins_alike_finds_the_pages(window: int | None) -> None:
    store = cache(window, prefix_sharing=True)
    group = store.groups[window]
    a, b, other = sequence(1, 21), sequence(2, 19), sequence(3, 21)
    list.__setitem__(other.tokens, 0, 77)
    write(store, a)
    assert store.admit(b)
    assert b.num_cached == 16
    shared = len(group.tables[2].pages)
    assert group.tables[2].pages == group.tables[1].pages[:shared] or window
    step = feed(store, (b, 3))
    assert stored(store, 0) == list(range(19))[-(min(19, window + 2) if window else 19) :]
    store.commit(step, [3])
    assert store.admit(other)
    assert other.num_cached == 0
    store.release([a, b, other])
    assert group.allocator.num_free == group.allocator.capacity
    again = sequence(4, 21)
    assert store.admit(again)
    assert again.num_cached == 20
    usage = store.usage()
    assert (usage.prompt_tokens, usage.prefix_tokens) == (82, 36)


def test_the_last_token_is_always_left_to_be_fed() -> None:
    store = cache(prefix_sharing=True)
    write(store, sequence(1, 8))
    twin = sequence(2, 8)
    assert store.admit(twin)
    assert twin.num_cached == 4


def test_a_salt_keeps_prefixes_apart() -> None:
    store = cache(prefix_sharing=True)
    salted = [Sequence(i, range(9), Settings(max_new_tokens=8, cache_salt=salt))
              for i, salt in enumerate(("", "a", "b", "a"))]  # fmt: skip
    for s in salted:
        write(store, s)
    assert store.usage().prefix_tokens == 8


def test_rejected_drafts_are_not_found_and_accepted_ones_are() -> None:
    store = cache(prefix_sharing=True)
    a = sequence(1, 3)
    assert store.admit(a)
    step = feed(store, (a, 3), drafts=(50, 51, 52, 53, 54, 55))
    store.commit(step, [5])  # the loop takes 50, 51 and one more
    a.tokens = [*a.tokens, *[50, 51, 60]]
    store.commit(feed(store, (a, 1)), [1])
    rejected, accepted = Sequence(2, [0, 1, 2, 50, 51, 52, 53, 54], SETTINGS), None
    assert store.admit(rejected)
    assert rejected.num_cached == 4
    a.tokens = [*a.tokens, *[61, 62]]
    store.commit(feed(store, (a, 2)), [2])
    accepted = Sequence(3, [*a.tokens, 9], SETTINGS)
    assert store.admit(accepted)
    assert accepted.num_cached == 8


def test_kept_pages_make_room_oldest_first() -> None:
    pages = PageAllocator(4)
    held = [pages.take(None) for _ in range(4)]
    for page in held:
        pages.publish(page, bytes([page]))
    pages.release(held[:2])
    pages.release(held[2:])
    assert (pages.num_free, pages.num_kept) == (4, 4)
    pages.share(held[:1])
    assert (pages.num_free, pages.num_kept) == (3, 3)
    assert pages.take(None) in held
    assert pages.find(bytes([held[0]])) == held[0]
    assert [pages.find(bytes([p])) for p in held[1:]] == [None] * 3
    with pytest.raises(OutOfPagesError):
        [pages.take(None) for _ in range(3)]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_an_preempted_sequence_gives_its_pages_back(window: int | None, swap: bool) -> None:
    store = cache(window, num_tokens=64, swap=swap)
    a = sequence(1, 30)
    write(store, a)
    before = stored_all(store, window)
    store.preempt(a)
    allocator = store.groups[window].allocator
    assert (a.num_cached, allocator.num_free, store.usage().swapped) == (0, 16, int(swap))
    blocker = sequence(2, 9)
    write(store, blocker)
    assert store.admit(a)
    assert a.num_cached == (30 if swap else 0)
    if swap:
        assert stored_all(store, window) == before
    store.release([a, blocker])
    assert (allocator.num_free, store.usage().swapped) == (16, 0)


def stored_all(store: PagedKVCache, window: int | None) -> list[float]:
    group = store.groups[window]
    return group.pools.layers[0].keys[group.tables[1].pages].flatten(0, 1)[:, 0, 0].tolist()


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
    model = build("gpt2").float()  # upcast to float32: it runs in no wider one
    model.config.reorder_and_upcast_attn = True
    with pytest.raises(PlanError, match="GPT2LMHeadModel"):
        jackfield.load(model, attn_implementation="eager", cache_implementation="paged")


@pytest.mark.parametrize("attention", ["sdpa", "cpu_decode"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_long_prompts_go_in_blocks(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackfield_plugins.attention.sdpa.BLOCK", 5)
    selection = {"attn_implementation": attention, "cache_implementation": "paged?page_size=4"}
    for chunk in (None, 7):
        with jackfield.load(model_of(family), prefill_chunk_size=chunk, **selection) as engine:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        assert [c.token_ids for c in found] == references(family, LENGTHS, COUNT)


def test_a_mixed_step_counts_prefill_and_decode() -> None:
    with jackfield.load(model_of("llama"), cache_implementation="paged") as engine:
        for prompt in prompts((4, 6)):
            engine._loop.submit(
                engine._intake.sequence(prompt, {"max_new_tokens": 4}, streams=False)
            )
            engine._loop.step()
        seen = engine.report()["attention"]
    assert (seen.prefill[0], seen.decode[0]) == (2, 1)


def test_a_model_that_somebody_else_calls_says_so() -> None:
    with jackfield.load(model_of("llama"), cache_implementation="paged") as engine:
        expected = engine.generate(prompts((4,)), max_new_tokens=3)[0].token_ids
        with pytest.raises(ExecutionError, match="called with 5 tokens by somebody else"):
            engine.model(torch.arange(5)[None])
        assert engine.generate(prompts((4,)), max_new_tokens=3)[0].token_ids == expected


def test_pages_of_a_live_model_do_not_outlive_its_weights() -> None:
    model = build("llama")
    (prompt,) = prompts((40,))
    with jackfield.load(model, cache_implementation="paged?page_size=4") as engine:
        both = engine.generate([prompt, prompt], max_new_tokens=2, settings=[{}, {"priority": -1}])
        assert both[0].token_ids == both[1].token_ids
        assert engine.statistics().cache.pages_kept == 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        found = engine.generate(prompt, max_new_tokens=3, logprobs=0)[0]
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        assert found.token_ids == engine.generate(prompt, max_new_tokens=3)[0].token_ids


def test_windows_let_in_who_fits_beside_what_they_hold() -> None:
    model = model_of("mistral")
    with jackfield.load(model, cache_implementation="paged?page_size=4&num_tokens=128") as engine:
        loop = engine._loop
        for prompt in prompts((30,) * 8):
            loop.submit(engine._intake.sequence(prompt, {"max_new_tokens": 60}, streams=False))
        for _ in range(12):
            loop.step()
        assert len(loop.running) >= 6  # of three or four pages each, and 32 there are


def test_of_those_that_share_a_page_the_last_keeps_it() -> None:
    """What `fits` counts is what is taken: two copies of a page that three write to."""
    store, a = cache(num_tokens=40), sequence(1, 6)
    others = [sequence(2, 7), sequence(3, 7)]
    store.commit(feed(store, (a, 6)), [6])
    store.fork([(a, other) for other in others], [])
    list.append(a.tokens, 6)
    group = store.groups[None]
    step = Step([ScheduledSequence(s, 6, 1) for s in (a, *others)])
    free = group.allocator.num_free
    assert sum(group.missing(s.id, 6, 7) for s in (a, *others)) == 3
    assert group.missing_of(step.scheduled) == 2
    for _ in range(free - 2):
        group.allocator.take(None)
    assert store.fits(step)
    group.allocator.take(None)
    assert not store.fits(step)
