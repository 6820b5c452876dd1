"""Decode steps that lie at the same addresses each time, with the numbers of the step in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting_device import DEVICE, counting_device

from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step, StepBlock
from jackfield.engine.checked_packed import CheckedPackedCache
from jackfield.errors import ExecutionError, PluginError
from jackfield_plugins.cache.paged.store import PagedKVCache

CPU = torch.device("cpu")
WINDOWS = (None, 6)


def store(device: torch.device = CPU, windows: Any = WINDOWS, tokens: int = 160) -> PagedKVCache:
    return PagedKVCache(windows, 4, tokens, device, spare=True, longest=64)


def grown(cache: Any, lengths: list[int], first: int = 0) -> list[Sequence]:
    """Sequences whose tokens are cached but for the last one."""
    found = []
    for number, length in enumerate(lengths, first):
        sequence = Sequence(number, list(range(50, 50 + length)), Settings(max_new_tokens=40))
        assert cache.admit(sequence)
        if count := length - 1 - sequence.num_cached:
            step = Step([ScheduledSequence(sequence, sequence.num_cached, count)])
            cache.prepare(step)
            cache.commit(step, [count])
        found.append(sequence)
    return found


def decoding(sequences: list[Sequence]) -> Step:
    return Step([ScheduledSequence(s, s.num_cached, 1) for s in sequences])


def addresses(fixed: Any) -> list[int]:
    tensors = [fixed.input_ids, fixed.position_ids]
    for tables in fixed.tables:
        tensors += [tables.block_table, tables.first, tables.step.seq_lens]
        tensors.append(tables.step.cu_seqlens_q)
    return [tensor.data_ptr() for tensor in tensors]


def test_a_step_lies_in_the_smallest_place_with_its_numbers() -> None:
    cache = store()
    places = {rows: cache.fix(rows) for rows in (2, 4)}
    before = {rows: addresses(fixed) for rows, fixed in places.items()}
    sequences = grown(cache, [9, 14, 3])
    for count, rows in ((1, 2), (2, 2), (3, 4), (2, 2), (3, 4)):
        step = decoding(sequences[:count])
        inputs = cache.prepare(step)
        fixed = inputs.fixed
        assert fixed is places[rows]
        assert addresses(fixed) == before[rows]
        starts = [item.start for item in step.scheduled]
        pad = rows - count
        assert fixed.input_ids.tolist() == [[s.tokens[-1] for s in sequences[:count]] + [0] * pad]
        assert fixed.position_ids.tolist() == [starts + [0] * pad]
        assert inputs.kwargs["input_ids"].shape == (1, count)
        for window, tables in zip(WINDOWS, fixed.tables, strict=True):
            group = cache.groups[window]
            held = [group.tables[s.id] for s in sequences[:count]]
            assert tables.step.seq_lens.tolist() == [at + 1 for at in starts] + [1] * pad
            assert tables.step.cu_seqlens_q.tolist() == list(range(rows + 1))
            assert tables.first.tolist() == [t.first for t in held] + [0] * pad
            for row, table in zip(tables.block_table.tolist(), held, strict=False):
                assert row[: len(table.pages)] == table.pages
            slots = [group.slot(s.id, s.num_cached) for s in sequences[:count]]
            assert group.targets.tolist() == slots + [group.spare_page * 4] * pad
            nobodys = [row[0] for row in tables.block_table.tolist()[count:]]
            assert nobodys == [group.allocator.capacity] * pad
        cache.commit(step, [1] * count)
        for sequence in sequences[:count]:
            list.append(sequence.tokens, 70 + sequence.num_cached)


def test_what_does_not_fit_lies_anywhere() -> None:
    """More rows, drafts, prompts, and texts longer than the tables; then nothing, once loosened."""
    cache = store(windows=(None,), tokens=400)
    cache.fix(2)
    sequences = grown(cache, [9, 14, 3, 66])
    assert cache.prepare(decoding(sequences[:3])).fixed is None
    assert cache.prepare(decoding(sequences[3:])).fixed is None
    drafts = Step([ScheduledSequence(sequences[0], 8, 1, (4, 5))])
    assert cache.prepare(drafts).fixed is None
    prompts = Step([ScheduledSequence(sequences[0], 8, 1), ScheduledSequence(sequences[1], 10, 3)])
    assert cache.prepare(prompts).fixed is None
    assert cache.prepare(decoding(sequences[:2])).fixed is not None
    cache.loosen(2)
    assert cache.prepare(decoding(sequences[:2])).fixed is None


@pytest.mark.parametrize("windows", [(6,), (6, 10), (None, 6), (None,)])
@pytest.mark.parametrize("longest", [22, 64, None])
def test_no_text_is_longer_than_its_place_says(windows: Any, longest: int | None) -> None:
    """Also one that outgrows the pools, whose windows let go of pages, and the context."""
    capacity = 28
    cache = PagedKVCache(windows, 4, capacity, CPU, spare=True, longest=longest)
    fixed = cache.fix(2)
    (sequence,) = grown(cache, [9])
    last = 60 if None not in windows else capacity
    due = last if longest is None else min(last, longest)
    placed = []
    while len(sequence.tokens) <= last:
        step = decoding([sequence])
        if cache.prepare(step).fixed is fixed:
            placed.append(len(sequence.tokens))
            for tables in fixed.tables:
                assert tables.step.max_seqlen_k >= len(sequence.tokens)
                assert max(span.kv_len for span in tables.step.spans) >= len(sequence.tokens)
        cache.commit(step, [1])
        list.append(sequence.tokens, 7)
    assert placed == list(range(9, due + 1))


def test_pages_that_move_are_not_fixed() -> None:
    with pytest.raises(ExecutionError, match="move; give it a fixed size"):
        PagedKVCache((None,), 4, None, CPU, spare=True).fix(1)


def test_one_copy_fills_a_place() -> None:
    """And another one the tables, where a sequence has taken a page."""
    with counting_device(pytest.MonkeyPatch()) as fake:
        cache = store(DEVICE, windows=(None,))
        cache.fix(2)
        sequences = grown(cache, [9, 14])
        copies = []
        for _ in range(8):
            step = decoding(sequences)
            begun = fake.copies.total()
            torch.zeros(1, device=DEVICE).item()  # the step before has ended
            fake.waits.clear()
            inputs = cache.prepare(step)
            assert inputs.fixed is not None
            assert not fake.waits, fake.waits
            copies.append(fake.copies.total() - begun)
            cache.commit(step, [1, 1])
            for sequence in sequences:
                list.append(sequence.tokens, 7)
    # 9 and 14 tokens take a page at 13 and 17, and at 17 and 21
    assert copies == [2, 1, 1, 2, 2, 1, 1, 2]


def test_what_is_put_into_a_place_has_room_there() -> None:
    block = StepBlock(CPU)
    memory = torch.zeros(64, dtype=torch.uint8)
    block.into(memory)
    first = block.put([1, 2, 3])
    second = block.put([4, 5], torch.int32)
    assert first.data_ptr() == memory.data_ptr()
    with pytest.raises(ValueError, match=r"72 bytes are put where 64 have room"):
        block.put([1] * 3)
    block.send()
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])
    assert block.put([6]).untyped_storage().data_ptr() != memory.data_ptr()


def _pages(tables: Any) -> None:
    tables.tables = [[999], *tables.tables[1:]]


def _too_few(tables: Any) -> None:
    tables.tables = [tables.tables[0][:1], *tables.tables[1:]]


def _first(tables: Any) -> None:
    tables.firsts = [8, *tables.firsts[1:]]


def _longest(tables: Any) -> None:
    tables.step.max_seqlen_k = 13


def _rows(tables: Any) -> None:
    tables.tables = tables.tables[:1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_pages, "page [999] for scheduled[0], of 41"),
        (_too_few, "1 pages of 4 in 16 columns for 9 tokens"),
        (_first, "pages from token 8 on for scheduled[0], which sees 0"),
        (_longest, "max_seqlen_k 13, 14 or more due"),
        (_rows, "pages of 1 rows for 2 sequences"),
    ],
)
def test_what_is_wrong_in_a_place_is_seen_before_it_is_played(
    wrong: Callable[[Any], None], said: str
) -> None:
    inner = store(windows=(None,))
    cache = CheckedPackedCache(inner, "cache 'mine'", (None,))
    fixed = cache.fix(2)
    cache.write(0, torch.zeros(2, 1, 8), torch.zeros(2, 1, 8))
    sequences = grown(inner, [9, 14])
    assert cache.prepare(decoding(sequences)).fixed is fixed
    (place,) = inner._fixed
    fill = place._fill

    def mistaken(rows: Any) -> None:
        fill(rows)
        wrong(place.step.tables[0])

    place._fill = mistaken  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="prepare has") as caught:
        cache.prepare(decoding(sequences))
    assert said in str(caught.value)


def _rewritten(change: Callable[[list[list[int]]], None]) -> Callable[[Any], None]:
    """Pages as `change` has them, on the host and on the device alike."""

    def wrong(tables: Any) -> None:
        rows = [list(pages) for pages in tables.tables]
        change(rows)
        tables.tables = rows
        for row, pages in enumerate(rows):
            tables.block_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    return wrong


def _foreign(rows: list[list[int]]) -> None:
    rows[1][-1] = rows[0][-1]


def _foreign_first(rows: list[list[int]]) -> None:
    rows[0][0] = rows[1][0]


def _twice(rows: list[list[int]]) -> None:
    rows[1][1] = rows[1][2]


def _beyond(rows: list[list[int]]) -> None:
    rows[1][1] = 999


OWNERS = {
    "foreign": (_foreign, "which part before it"),
    "foreign first": (_foreign_first, "which part before it"),
    "twice": (_twice, "a page twice in"),
    "beyond": (_beyond, "999, "),
}


def checked(inner: PagedKVCache) -> CheckedPackedCache:
    cache = CheckedPackedCache(inner, "cache 'mine'", (None,))
    cache.fix(2)
    cache.write(0, torch.zeros(2, 1, 8), torch.zeros(2, 1, 8))
    return cache


def played(cache: Any, sequences: list[Sequence]) -> None:
    """A step whose recording is played, so that no layer writes."""
    step = decoding(sequences)
    assert cache.prepare(step).fixed is not None
    cache.commit(step, [1] * len(sequences))
    for number, sequence in enumerate(sequences):
        list.append(sequence.tokens, 90 + number)


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3])  # of those that are looked at closely
def test_pages_at_a_fixed_place_belong_to_whom_they_belonged(name: str, steps: int) -> None:
    """In the first step there, and after others; rows differ from their first token on."""
    change, said = OWNERS[name]
    inner = store(windows=(None,))
    cache = checked(inner)
    sequences = grown(inner, [9, 14])
    list.__setitem__(sequences[1].tokens, 0, 7)
    for _ in range(steps):
        played(cache, sequences)
    (place,) = inner._fixed
    fill = place._fill

    def mistaken(rows: Any) -> None:
        fill(rows)
        _rewritten(change)(place.step.tables[0])

    place._fill = mistaken  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="prepare has") as caught:
        cache.prepare(decoding(sequences))
    assert said in str(caught.value), caught.value


def test_what_is_right_at_a_fixed_place_is_nobodys_fault() -> None:
    """Pages of one that has left are had by another; prefixes that are alike are shared."""
    inner = PagedKVCache((None, 6), 4, 160, CPU, spare=True, longest=64, prefix_sharing=True)
    cache = CheckedPackedCache(inner, "cache 'mine'", (None, 6))
    cache.fix(4)
    for layer in range(2):
        cache.write(layer, torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    running = grown(inner, [9, 14, 9])
    shared = 0
    for number in range(12):
        played(cache, running)
        tables = [inner.groups[None].tables[s.id].pages for s in running]
        shared += len({*tables[0]} & {*tables[-1]})
        gone = running.pop(number % 3)
        cache.release([gone])
        running += grown(inner, [7 + number % 5], first=10 + number)
    assert shared
