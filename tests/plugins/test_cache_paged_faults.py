"""A paged cache in which something failed once: the next step is the one that was asked for."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch

from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step
from jackfield.errors import ExecutionError
from jackfield_plugins.cache.paged import pools
from jackfield_plugins.cache.paged.store import PagedKVCache

CPU = torch.device("cpu")


def store(windows: Any = (None, 6), tokens: int | None = 160, **more: Any) -> PagedKVCache:
    return PagedKVCache(windows, 4, tokens, CPU, **more)


def begun(number: int, length: int) -> Sequence:
    return Sequence(number, list(range(50, 50 + length)), Settings(max_new_tokens=40))


def grown(cache: PagedKVCache, lengths: list[int], first: int = 0) -> list[Sequence]:
    """Sequences whose tokens are cached but for the last one."""
    found = [begun(number, length) for number, length in enumerate(lengths, first)]
    for sequence in found:
        assert cache.admit(sequence)
        count = len(sequence.tokens) - 1
        step = Step([ScheduledSequence(sequence, 0, count)])
        cache.prepare(step)
        cache.commit(step, [count])
    return found


def decoding(sequences: list[Sequence]) -> Step:
    return Step([ScheduledSequence(s, s.num_cached, 1) for s in sequences])


class FailsOnce:
    """`call`, whose `turn`th call is a failure, before it has done its work or behind it."""

    def __init__(self, call: Any, turn: int, *, behind: bool) -> None:
        self.call, self.left, self.behind = call, turn, behind

    def __call__(self, *given: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.behind:
            raise torch.OutOfMemoryError("out of memory")
        found = self.call(*given)
        if self.left == 0:
            raise torch.OutOfMemoryError("out of memory")
        return found


@pytest.mark.parametrize("turn", range(1, 8))
@pytest.mark.parametrize(("name", "behind"), [("put", False), ("put", True), ("send", True)])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_step_after_one_that_was_not_sent_has_its_own_pages(
    monkeypatch: pytest.MonkeyPatch, fixed: bool, name: str, behind: bool, turn: int
) -> None:
    """The same sequences, whose tables are no others; in another order; and those of before."""
    cache = store(spare=True, longest=64)
    if fixed:
        cache.fix(2)
    others = grown(cache, [14, 9])
    cache.prepare(decoding(others))
    sequences = grown(cache, [9, 23], first=2)
    block: Any = cache._layout.block
    once = FailsOnce(getattr(block, name), turn, behind=behind)
    with monkeypatch.context() as patch:
        patch.setattr(block, name, once)
        try:
            cache.prepare(decoding(sequences))
        except torch.OutOfMemoryError:
            pass
        else:
            assert once.left > 0
    for step_of in (sequences, sequences[::-1], others):
        inputs = cache.prepare(decoding(step_of))
        assert (inputs.fixed is not None) == fixed
        assert inputs.kwargs["input_ids"].tolist() == [[s.tokens[-1] for s in step_of]]
        assert inputs.kwargs["position_ids"].tolist() == [[s.num_cached for s in step_of]]
        for group in cache.groups.values():
            held = [group.tables[s.id] for s in step_of]
            for row, table in zip(group.now.block_table.tolist(), held, strict=True):
                assert row[: len(table.pages)] == table.pages
            assert group.now.first.tolist() == [table.first for table in held]
            assert group.now.step.seq_lens.tolist() == [s.num_cached + 1 for s in step_of]
            assert group.targets.tolist() == [group.slot(s.id, s.num_cached) for s in step_of]


@pytest.mark.parametrize("turn", range(1, 5))  # keys and values of two layers
def test_a_pool_that_failed_to_grow_grows_the_next_time(
    monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    cache = store((None, None), tokens=None, first_pages=2)
    once = FailsOnce(pools._larger, turn, behind=False)
    monkeypatch.setattr(pools, "_larger", once)
    kept = written(cache, begun(0, 8), 8)
    failing = begun(1, 24)
    with pytest.raises(torch.OutOfMemoryError):
        written(cache, failing, 24)
    cache.release([failing])
    (group,) = cache.groups.values()
    assert (group.allocator.capacity, group.allocator.num_free) == (2, 0)
    written(cache, begun(2, 24), 24)
    assert {len(layer.keys) for layer in group.pools.layers.values()} == {group.capacity}
    pages = torch.tensor(group.tables[kept.id].pages)
    for layer in group.pools.layers.values():
        assert layer.keys[pages].flatten().tolist() == list(range(8))


def written(cache: PagedKVCache, sequence: Sequence, count: int) -> Sequence:
    """A sequence with its first `count` tokens cached; keys are their positions."""
    assert cache.admit(sequence)
    step = Step([ScheduledSequence(sequence, 0, count)])
    at = cache.prepare(step).kwargs["position_ids"][0].float()[:, None, None]
    for layer in range(2):
        cache.write(layer, at, -at)
    cache.commit(step, [count])
    return sequence


def test_pools_of_another_dtype_that_could_not_be_made_are_made_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = store((None,), tokens=16)
    cache.allocate([((1, 1), (1, 1))], "float16")
    one = begun(0, 3)
    cache.admit(one)
    cache.prepare(Step([ScheduledSequence(one, 0, 3)]))
    states = torch.ones(3, 1, 1)
    with monkeypatch.context() as patch:
        zeros = torch.Tensor.new_zeros
        patch.setattr(torch.Tensor, "new_zeros", FailsOnce(zeros, 1, behind=False))
        with pytest.raises(torch.OutOfMemoryError):
            cache.write(0, states, states)
    assert cache.write(0, states, states).keys.shape == (4, 4, 1, 1)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("fails", ["forward", "prepare"])
def test_a_step_that_failed_leaves_nobody_to_write(
    monkeypatch: pytest.MonkeyPatch, fails: str, fixed: bool
) -> None:
    cache = store(spare=True, longest=64)
    if fixed:
        cache.fix(2)
    sequences = grown(cache, [9, 14])
    cache.prepare(decoding(sequences))  # its forward fails
    if fails == "prepare":
        failing = FailsOnce(cache._layout.block.put, 1, behind=False)
        monkeypatch.setattr(cache._layout.block, "put", failing)
        with pytest.raises(torch.OutOfMemoryError):
            cache.prepare(decoding(sequences))
    else:
        cache.release(sequences)
    with pytest.raises(ExecutionError, match="by somebody else"):
        cache.write(0, torch.zeros(2, 1, 8), torch.zeros(2, 1, 8))


def test_a_sequence_that_came_back_is_truncated() -> None:
    cache = store((None, None), swap=True)
    one = written(cache, begun(0, 9), 9)
    cache.preempt(one)
    assert cache.admit(one)
    assert one.num_cached == 9
    cache.truncate(one, 8)
    assert one.num_cached == 8


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("what", ["copy", "before_writing", "grow"])
@pytest.mark.parametrize("turn", range(1, 5))
@pytest.mark.parametrize("behind", [True, False])
def test_a_page_that_could_not_be_copied_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, fixed: bool, what: str, turn: int, behind: bool
) -> None:
    """Whatever fails of a copy-on-write, or of growing for one: every page held is in a table."""
    cache = store((None, 6), tokens=160 if fixed else None, first_pages=4)
    source, copies = written(cache, begun(0, 6), 6), [begun(1, 6), begun(2, 6)]
    for into in copies:
        cache.fork([(source, into)], [])
        assert list.append(into.tokens, 7) is None
    list.append(source.tokens, 8)
    group = next(iter(cache.groups.values()))
    owner, name = {
        "copy": (group.pools, "copy"),
        "before_writing": (group, "_before_writing"),
        "grow": (group.pools, "grow"),
    }[what]
    once = FailsOnce(getattr(owner, name), turn, behind=behind)
    monkeypatch.setattr(owner, name, once)
    step = decoding([source, *copies])
    with contextlib.suppress(torch.OutOfMemoryError):
        cache.prepare(step)
    for own in cache.groups.values():
        shown = Counter(page for table in own.tables.values() for page in table.pages)
        assert own.allocator._holders == dict(shown)
    cache.release([source, *copies])
    for own in cache.groups.values():
        assert own.allocator.num_free == own.allocator.capacity
    again = written(cache, begun(3, 6), 6)
    assert again.num_cached == 6
