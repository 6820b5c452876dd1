"""Pages and who holds them: an allocator with reference counts."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPagesError(Exception):
    """The pool has no page left; the caller says what that means."""


class PageAllocator:
    """Hands out page numbers below `capacity`.

    A sequence whose pages lie in a row is read without a copy, so growth prefers the page behind
    the last one, and a new sequence begins in the middle of the widest gap, away from the others.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holders = [0] * capacity

    @property
    def num_free(self) -> int:
        return self._holders.count(0)

    def grow(self, capacity: int) -> None:
        """Add pages up to `capacity`."""
        self._holders += [0] * (capacity - self.capacity)
        self.capacity = capacity

    def take(self, after: int | None) -> int:
        """One page, held once: behind `after` if that is free. Raises OutOfPagesError."""
        if after is not None and after + 1 < self.capacity and not self._holders[after + 1]:
            page = after + 1
        else:
            page = self._in_widest_gap(first=after is None)
        self._holders[page] = 1
        return page

    def _in_widest_gap(self, *, first: bool) -> int:
        start, length = widest_gap(self._holders)
        if not length:
            raise OutOfPagesError
        # Leave the first half of a gap to the sequence that grows towards it.
        return start if first and start == 0 else start + length // 2

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page; a page without holders is free."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._holders[page] -= 1


def widest_gap(holders: Sequence[int]) -> tuple[int, int]:
    """(start, length) of the longest run of zeros; the first of equals."""
    best = start = length = 0
    for page, held in enumerate(holders):
        if held:
            length = 0
            continue
        length += 1
        if length > best:
            best, start = length, page - length + 1
    return start, best
