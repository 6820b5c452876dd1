"""Pages and who holds them: an allocator with reference counts, and what pages are kept for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jackfield_plugins.cache.paged.gaps import Gaps

#: Kept pages that make room at once: in a row where possible, like those they came from.
EXTENT = 16


class OutOfPagesError(Exception):
    """The pool has no page left; the caller says what that means."""


class PageAllocator:
    """Hands out page numbers below `capacity`.

    A sequence whose pages lie in a row is read without a copy, so growth prefers the page behind
    the last one, and a new sequence begins in the middle of the widest gap, away from the others.

    A page can be published under a key that says what it holds. When its last holder lets go, it
    is kept, to be found by its key, until its place is needed: the one that was released first
    goes first.

    What a call costs does not depend on how many pages there are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._gaps = Gaps(capacity)
        self._holders: dict[int, int] = {}  # of each page that is held
        self._kept: OrderedDict[int, None] = OrderedDict()  # in the order of their release
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many pages can be taken; kept ones can."""
        return self.capacity - len(self._holders)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def grow(self, capacity: int) -> None:
        """Add pages up to `capacity`."""
        self._gaps.add(range(self.capacity, capacity))
        self.capacity = capacity

    def take(self, after: int | None) -> int:
        """One page, held once: behind `after` if that is free. Raises OutOfPagesError."""
        if len(self._holders) + len(self._kept) == self.capacity:
            self._make_room()
        if after is not None and self._gaps.starts(after + 1):
            page = after + 1
            self._gaps.take(page)
        else:
            page = self._in_widest_gap(first=after is None)
        self._holders[page] = 1
        return page

    def _make_room(self) -> None:
        if not self._kept:
            raise OutOfPagesError
        self.forget(EXTENT)

    def forget(self, count: int | None = None) -> None:
        """Free the `count` kept pages that were released first; None: all."""
        freed = []
        for _ in range(len(self._kept) if count is None else min(count, len(self._kept))):
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            freed.append(page)
        self._gaps.add_each(freed)

    def _in_widest_gap(self, *, first: bool) -> int:
        start, length = self._gaps.widest()
        # Leave the first half of a gap to the sequence that grows towards it.
        page = start if first and start == 0 else start + length // 2
        self._gaps.split(start, page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            self._holders[page] = self.holders(page) + 1
            self._kept.pop(page, None)

    def is_shared(self, page: int) -> bool:
        return self.holders(page) > 1

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def is_kept(self, page: int) -> bool:
        return page in self._kept

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page. The last ones are forgotten first: others build on less.

        A page without holders is kept if it was published, and free otherwise.
        """
        if not pages:
            return
        freed = []
        for page in reversed(pages):
            left = self.holders(page) - 1
            if left < 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            if left:
                self._holders[page] = left
                continue
            del self._holders[page]
            if page in self._key_of:
                self._kept[page] = None
            else:
                freed.append(page)
        self._gaps.add_each(freed)

    def publish(self, page: int, key: bytes) -> None:
        """Let `page` be found by `key`, unless another page is."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)
