"""The free pages of a pool, as gaps between those that are taken."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush


class Gaps:
    """Runs of free pages below `capacity`: neighbours are merged, and the widest is known.

    A gap is looked up by either end, and a heap has it by its length. What the heap says of a gap
    may be too much, since pages are taken without looking for them there; it is put right when it
    comes up. So no call looks at more than a few gaps, however many pages there are.
    """

    def __init__(self, capacity: int) -> None:
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._widest: list[tuple[int, int, int]] = []  # (-length, start, end)
        self.add(range(capacity))

    def starts(self, page: int) -> bool:
        """Whether a gap begins with `page`."""
        return page in self._end_of

    def add(self, pages: range) -> None:
        """Free pages that lie in a row, none of them free before."""
        self._note({self._merge(pages.start, pages.stop)} if pages else ())

    def add_each(self, pages: Iterable[int]) -> None:
        """Free these pages, none of them free before."""
        self._note({self._merge(page, page + 1) for page in pages})

    def take(self, page: int) -> None:
        """The first page of a gap is free no more."""
        end = self._end_of.pop(page)
        if page + 1 < end:
            self._put(page + 1, end)
        else:
            del self._start_of[end]

    def split(self, start: int, page: int) -> None:
        """`page`, in the gap that begins at `start`, is free no more."""
        if page == start:
            return self.take(page)
        end = self._end_of[start]
        self._put(start, page)
        if page + 1 < end:
            self._put(page + 1, end)
        else:
            del self._start_of[end]
        self._note((page,))
        return None

    def widest(self) -> tuple[int, int]:
        """(start, length) of the widest gap, the first of equals. There must be one."""
        while True:
            length, start, end = self._widest[0]
            now = self._start_of.get(end)
            if now == start:
                return start, -length
            heappop(self._widest)
            if now is not None and now - end > length:  # it was wider
                heappush(self._widest, (now - end, now, end))

    def _put(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start

    def _merge(self, start: int, end: int) -> int:
        """Free `start:end` together with what is free beside it; returns where that ends."""
        if end in self._end_of:
            end = self._end_of.pop(end)
        if start in self._start_of:
            start = self._start_of.pop(start)
        self._put(start, end)
        return end

    def _note(self, ends: Iterable[int]) -> None:
        """Let the gaps with these ends be found by their length."""
        for end in ends:
            if (start := self._start_of.get(end)) is not None:
                heappush(self._widest, (start - end, start, end))
        if len(self._widest) > 64 + 4 * len(self._start_of):  # most of it is past
            self._widest = [(s - e, s, e) for e, s in self._start_of.items()]
            heapify(self._widest)
