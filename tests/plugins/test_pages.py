"""Pages are chosen as a plain search would choose them, at a cost that no pool size changes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jackfield.contracts import StepBlock
from jackfield_plugins.cache.paged import gaps
from jackfield_plugins.cache.paged.pages import EXTENT, OutOfPagesError, PageAllocator
from jackfield_plugins.cache.paged.tables import CachedTable, Table

HUGE = 1 << 60  # pages: whoever looks at each of them, or has a number for each, does not return


class Searching:
    """The same choices by looking at every page."""

    def __init__(self, capacity: int) -> None:
        self.taken = bytearray(capacity)

    def choose(self, after: int | None) -> int:
        if after is not None and after + 1 < len(self.taken) and not self.taken[after + 1]:
            return after + 1
        longest = len(max(self.taken.split(b"\1"), key=len))
        start = self.taken.find(bytes(longest))
        return start if after is None and start == 0 else start + longest // 2


def storm(
    allocator: PageAllocator, rounds: int, seed: int, see: Callable[[int | None, int], None]
) -> None:
    """Sequences that come, grow, share, publish, truncate and go; `see(after, page)` for each take.

    About 50 pages are held at most, by eight sequences.
    """
    chance = random.Random(seed)
    rows: dict[int, list[int]] = {}
    keys = 0
    for turn in range(rounds):
        act = chance.random()
        held = sum(map(len, rows.values()))
        if act < 0.5 and held < 48 and (not rows or act < 0.2):
            rows[turn] = []
        if act < 0.5 and held < 48 and rows:
            row = chance.choice(list(rows.values()))
            for _ in range(chance.randrange(1, 6)):
                after = row[-1] if row else None
                try:
                    page = allocator.take(after)
                except OutOfPagesError:
                    break
                see(after, page)
                row.append(page)
        elif act < 0.6 and 0 < len(rows) < 8:
            row = chance.choice(list(rows.values()))
            allocator.share(row)
            rows[-turn] = list(row)
        elif act < 0.75 and rows:
            for page in chance.choice(list(rows.values())):
                keys += 1
                allocator.publish(page, keys.to_bytes(16, "big"))
        elif act < 0.85 and rows:
            row = chance.choice(list(rows.values()))
            count = chance.randrange(len(row) + 1)
            allocator.release(row[count:])
            del row[count:]
        elif rows:
            allocator.release(rows.pop(chance.choice(list(rows))))


@pytest.mark.parametrize("capacity", [1, 2, 7, 40, 64, 200])
@pytest.mark.parametrize("seed", range(6))
def test_every_page_is_the_one_that_a_search_finds(capacity: int, seed: int) -> None:
    allocator, search = PageAllocator(capacity), Searching(capacity)

    def taken() -> set[int]:
        return set(allocator._holders) | set(allocator._kept)

    def see(after: int | None, page: int) -> None:
        now = taken() - {page}
        search.taken = bytearray(int(p in now) for p in range(allocator.capacity))
        assert page == search.choose(after)
        assert allocator.num_free == allocator.capacity - len(allocator._holders)
        free = {p for s, e in allocator._gaps._end_of.items() for p in range(s, e)}
        assert free == set(range(allocator.capacity)) - taken()

    storm(allocator, 300, seed, see)
    allocator.grow(capacity + 13)
    storm(allocator, 100, seed + 1, see)


def lines(work: Callable[[], Any]) -> int:
    """How many lines of Python `work` runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_pool_of_any_size_costs_the_same() -> None:
    """Also in memory; a list of this many, or a look at each, would never return."""
    counts = [
        lines(lambda c=capacity: storm(PageAllocator(c), 400, 5, lambda *_: None))  # type: ignore[misc]
        for capacity in (10_000, HUGE)
    ]
    assert counts[0] == counts[1]


def of_kept(pages: int) -> PageAllocator:
    """All of its pages kept, for whoever finds them."""
    allocator = PageAllocator(pages)
    row: list[int] = []
    for at in range(pages):
        row.append(allocator.take(row[-1] if row else None))
        allocator.publish(row[-1], at.to_bytes(16, "big"))
    allocator.release(row)
    assert allocator.num_kept == pages
    return allocator


def test_making_room_looks_at_no_more_pages_than_it_frees() -> None:
    """A page costs as much where thousands are kept as where a few are, each time again."""

    def churn(allocator: PageAllocator) -> None:
        for at in range(40 * EXTENT):
            page = allocator.take(None)
            allocator.publish(page, (1 << 40 | at).to_bytes(16, "big"))
            allocator.release([page])

    few, many = lines(lambda: churn(of_kept(200))), lines(lambda: churn(of_kept(5000)))
    alone = [lines(lambda n=n: of_kept(n)) for n in (200, 5000)]  # type: ignore[misc]
    assert many - alone[1] < 2 * (few - alone[0])


def test_the_heap_of_gaps_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"heappush": 0, "heappop": 0}
    for name in calls:
        honest = getattr(gaps, name)

        def counted(*args: Any, name: str = name, honest: Any = honest) -> Any:
            calls[name] += 1
            return honest(*args)

        monkeypatch.setattr(gaps, name, counted)
    allocator, sizes, takes = PageAllocator(HUGE), [], 0

    def see(*_: object) -> None:
        nonlocal takes
        takes += 1
        sizes.append(len(allocator._gaps._widest) / (16 + len(allocator._gaps._start_of)))

    row = [allocator.take(None)]
    for _ in range(1000):
        for _ in range(4):
            row.append(allocator.take(row[-1]))
            see()
        allocator.release(row[1:])
        del row[1:]
    assert max(sizes) < 6
    storm(allocator, 10_000, 1, see)
    assert takes > 5000
    assert max(sizes) < 6
    assert sum(calls.values()) < 8 * takes


@pytest.mark.parametrize("seed", range(5))
def test_a_kept_table_is_the_table_made_anew(seed: int) -> None:
    """Rows that come, go, change places, grow and are cut; what was handed out stays as it was."""
    chance, kept, block = random.Random(seed), CachedTable(), StepBlock(torch.device("cpu"))
    tables: list[Table] = []
    given: list[tuple[torch.Tensor, list[list[int]]]] = []
    for turn in range(200):
        act = chance.random()
        if act < 0.2 or not tables:
            tables.insert(chance.randrange(len(tables) + 1), Table([turn], turn))
        elif act < 0.3 and len(tables) > 1:
            tables.pop(chance.randrange(len(tables)))
        elif act < 0.4:
            chance.shuffle(tables)
        table = chance.choice(tables)
        if act > 0.5:
            table.append(chance.choice([turn, table.pages[-1] + 1]))
        if act > 0.8:
            table.cut(max(1, len(table.pages) - 3))
        if act > 0.9:
            table.replace(0, turn)
        if act > 0.95 and len(table.pages) > 1:
            table.advance(1, 4)
        rows = [t.row() for t in tables]
        width = max(len(t.pages) for t in tables)
        due = [t.pages + [0] * (width - len(t.pages)) for t in tables]
        made = kept(rows, block)
        assert made.dtype == torch.int32
        given.append((made, due))
        for t, row in zip(tables, rows, strict=True):
            assert (list(row.pages), row.first) == (t.pages, t.first)
            assert row.in_a_row == (t.pages == list(range(t.pages[0], t.pages[0] + len(t.pages))))
    assert all(made.tolist() == due for made, due in given)


def test_only_rows_that_changed_are_written() -> None:
    kept, block = CachedTable(), StepBlock(torch.device("cpu"))
    tables = [Table(range(100 * i, 100 * i + 64)) for i in range(32)]
    first = kept([t.row() for t in tables], block)
    assert kept.written == 32
    assert kept([t.row() for t in tables], block) is first
    for turn, table in enumerate(tables):
        table.append(turn)
        assert kept([t.row() for t in tables], block) is not first
    assert kept.written in (64, 32 + 32 + 32)  # one each time, and all once as it became wider
