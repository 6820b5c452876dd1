"""A paged cache in which something failed once: the next step is the one that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jackfield.contracts import Feed, Sequence, Settings, Step
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
        step = Step([Feed(sequence, 0, count)])
        cache.prepare(step)
        cache.commit(step, [count])
    return found


def decoding(sequences: list[Sequence]) -> Step:
    return Step([Feed(s, s.num_cached, 1) for s in sequences])


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
