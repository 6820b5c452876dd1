"""The pages of the layers that remember alike: all full-attention layers, or all of one window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.contracts import PackedLayer, PackedStep, PageTables, StepBlock
from jackfield_plugins.cache.paged.pages import PageAllocator
from jackfield_plugins.cache.paged.pools import NO_TABLES, Pools
from jackfield_plugins.cache.paged.storing import StepSlots, StoredStates, on_gpu
from jackfield_plugins.cache.paged.swapping import HostPages, PageSwap, swap_on
from jackfield_plugins.cache.paged.tables import CachedTable, CachedTensor, Table

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch

    from jackfield.contracts import NativeCall, ScheduledSequence


@dataclass(frozen=True, eq=False)
class SwappedPages:
    """What the pages of one sequence held, in host memory: keys and values by layer."""

    count: int
    first: int
    layers: dict[int, HostPages]


class LayerGroup:
    """Layers with one page table per sequence in common, each with a pool of its own.

    `window`: a layer of it sees the last `window` tokens only; pages before them are given back.
    `spare`: pools, which are `fixed` then, have a page that no sequence gets.
    """

    def __init__(
        self, window: int | None, page_size: int, capacity: int, fixed: bool, *, spare: bool = False
    ) -> None:
        self.window = window
        self.page_size = page_size
        self.fixed = fixed
        self.spare = int(spare)
        self.allocator = PageAllocator(capacity)
        self.tables: dict[int, Table] = {}
        self.pools = Pools(page_size)
        self.now: PageTables = NO_TABLES  # this step's
        self.targets: torch.Tensor  # the slots of this step's tokens, [tokens]
        self.forget_tables()
        self._stored: dict[int, StoredStates] = {}  # by layer, of the last step that was native
        self._step_slots = StepSlots()
        self._swap: PageSwap | None = None  # made when a first sequence is swapped

    def places_for(self, tokens: int, prompt: int, chunk: int | None) -> int:
        """For how many tokens a sequence that grows to `tokens` needs places at once.

        `prompt` tokens come first, `chunk` of them in each step (None: all), then one a step.
        A window lets go only between steps, and only of whole pages.
        """
        if self.window is None:
            return tokens
        first = prompt if chunk is None else min(prompt, chunk)
        later = 1 if first == prompt else first
        return min(tokens, max(first, self.window + self.page_size - 2 + later))

    def pages_for(self, tokens: int, prompt: int, chunk: int | None) -> int:
        """How many pages such a sequence holds at most."""
        return -(-self.places_for(tokens, prompt, chunk) // self.page_size)

    def most_pages(self, tokens: int) -> int:
        """How many pages a sequence of up to `tokens` tokens holds that feeds one a step."""
        return self.pages_for(tokens, 1, None) + (self.window is not None)

    @property
    def capacity(self) -> int:
        """How many pages the pools have, the spare one included."""
        return self.allocator.capacity + self.spare

    @property
    def spare_page(self) -> int:
        return self.allocator.capacity

    def missing(self, sequence: int, start: int, end: int) -> int:
        """How many pages `reserve` will take."""
        table = self.tables.get(sequence, _EMPTY)
        kept = table.pages[(start - table.first) // self.page_size :]
        shared = sum(map(self.allocator.is_shared, kept))
        return shared + max(0, -(-(end - table.first) // self.page_size) - len(table.pages))

    def missing_of(self, scheduled: Seq[ScheduledSequence]) -> int:
        """How many pages `reserve` will take for all of `scheduled` together.

        Less than the sum where some that share a page write to it: each takes a copy, but the last
        one keeps it if nobody else holds it then.
        """
        count = 0
        writers: Counter[int] = Counter()
        for item in scheduled:
            table = self.tables.get(item.sequence.id, _EMPTY)
            end = item.start + item.num_tokens + len(item.drafts)
            count += max(0, -(-(end - table.first) // self.page_size) - len(table.pages))
            writers.update(table.pages[(item.start - table.first) // self.page_size :])
        holders = self.allocator.holders
        return count + sum(min(n, holders(page) - 1) for page, n in writers.items())

    def largest(self, sequence: int, cached: int) -> int:
        """How many tokens can follow `cached` ones in one step, with the whole pool to itself."""
        table = self.tables.get(sequence, _EMPTY)
        return self.allocator.capacity * self.page_size - (cached - table.first)

    def seen_from(self, tokens: int) -> int:
        """The first page, counted from token 0, that a query at position `tokens` sees."""
        if self.window is None:
            return 0
        return max(0, tokens + 1 - self.window) // self.page_size

    def known(self, keys: Seq[bytes]) -> int:
        """How many of the pages with these keys are there, up to the first that is needed and not.

        A window needs the last ones only, so there it is all of them, until `find` says otherwise.
        """
        if self.window is not None:
            return len(keys)
        gone = (at for at, key in enumerate(keys) if self.allocator.find(key) is None)
        return next(gone, len(keys))

    def find(self, keys: Seq[bytes]) -> list[int] | None:
        """The pages that a sequence sees of full pages with these keys; None where one is gone."""
        found = []
        for key in keys[self.seen_from(len(keys) * self.page_size) :]:
            if (page := self.allocator.find(key)) is None:
                return None
            found.append(page)
        return found

    def adopt(self, sequence: int, pages: list[int], end: int) -> None:
        """Begin a sequence with shared `pages`, the last of which ends with token `end` - 1."""
        self.allocator.share(pages)
        self.tables[sequence] = Table(pages, end - len(pages) * self.page_size)

    def publish(self, sequence: int, keys: Seq[bytes], begin: int) -> None:
        """Let the pages from the `begin`th on, counted from token 0, be found by `keys`."""
        table = self.tables[sequence]
        before = table.first // self.page_size
        for at in range(max(begin, before), len(keys)):
            self.allocator.publish(table.pages[at - before], keys[at])

    def save(self, sequence: int) -> SwappedPages:
        """A copy of a sequence's pages in host memory, on its way there maybe."""
        table = self.tables[sequence]
        if not table.pages or not self.pools.layers:
            return SwappedPages(len(table.pages), table.first, {})
        layers = self._swapping().out(table.pages, self.pools.layers)
        return SwappedPages(len(table.pages), table.first, layers)

    def saved_bytes(self, sequence: int) -> int:
        """The host memory that `save` takes."""
        count = len(self.tables[sequence].pages)
        if not count or not self.pools.layers:
            return 0
        return self._swapping().host_bytes(count, self.pools.layers)

    def _swapping(self) -> PageSwap:
        if self._swap is None:
            self._swap = swap_on(self.pools.device)
        return self._swap

    def restore(self, sequence: int, saved: SwappedPages) -> None:
        """Take pages and put back what was saved."""
        table = self.tables[sequence] = Table([], saved.first)
        for _ in range(saved.count):
            table.append(self._take(table.pages[-1] if table.pages else None))
        if saved.layers:
            self._swapping().back(table.pages, self.pools.layers, saved.layers)

    def reserve(self, sequence: int, start: int, end: int) -> None:
        """Make pages for tokens `start:end` of a sequence, none of them shared with another.

        Raises OutOfPagesError where the pool is fixed and full.
        """
        table = self.tables.get(sequence)
        if table is None:
            table = self.tables[sequence] = Table()
        pages, size = table.pages, self.page_size
        for _ in range(-(-(end - table.first) // size) - len(pages)):
            table.append(self._take(pages[-1] if pages else None))
        written = (start - table.first) // size
        for at in range(written, len(pages)):
            if self.allocator.is_shared(pages[at]):
                table.replace(at, self._copy(pages[at]))
        if self._swap is not None:
            self._before_writing(pages[written:])

    def _before_writing(self, pages: list[int]) -> None:
        """A page may be on its way to host memory still, though nobody holds it any more."""
        if self._swap is not None:
            self._swap.before_writing(pages)

    def _take(self, after: int | None) -> int:
        if not self.fixed and self.allocator.num_free == 0:
            self._grow(2 * self.allocator.capacity)
        return self.allocator.take(after)

    def _grow(self, capacity: int) -> None:
        self.pools.grow(capacity)  # may fail: then there are no pages more than there were
        self.allocator.grow(capacity)

    def _copy(self, page: int) -> int:
        """Copy-on-write: a page of our own with the same tokens."""
        own = self._take(None)
        try:
            self._before_writing([own])
            self.pools.copy(page, own)
        except BaseException:
            self.allocator.release([own])
            raise
        self.allocator.release([page])
        return own

    def lay_out(self, sequences: Seq[int], step: PackedStep, block: StepBlock) -> list[int]:
        """Point every layer of the group at the pages of this step's sequences.

        Returns the slots of the step's tokens, which the caller sets as `targets`. Tables are put
        into `block`, which the caller sends.
        """
        held = [self.tables[s] for s in sequences]
        rows = [table.row() for table in held]
        firsts = [row.first for row in rows]
        self.now = PageTables(
            step,
            self.window,
            self.page_size,
            self._block_table(rows, block),
            self._first(firsts, block),
            [row.pages for row in rows],
            firsts,
            in_a_row=[row.in_a_row for row in rows],
        )
        self.pools.point(self.now)
        slots: list[int] = []
        for table, (_, count, end) in zip(held, step.spans, strict=True):
            slots += self._slots(table, end - count - table.first, end - table.first)
        return slots

    def use(self, tables: PageTables, targets: torch.Tensor | None = None) -> None:
        """Have every layer read by `tables`, and write to the slots `targets`, `[tokens]`."""
        self.now = tables
        self.pools.point(tables)
        if targets is not None:
            self.targets = targets

    def slot(self, sequence: int, position: int) -> int:
        """Where a sequence has the token at `position`."""
        table, size = self.tables[sequence], self.page_size
        page, at = divmod(position - table.first, size)
        return table.pages[page] * size + at

    def _slots(self, table: Table, begin: int, end: int) -> list[int]:
        """Where the tokens `begin:end` go, counted from the first of the first page."""
        pages, size = table.pages, self.page_size
        return [pages[at // size] * size + at % size for at in range(begin, end)]

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store `[tokens, kv_heads, head_dim]` of this step; returns what to attend to."""
        layer = self.pools.layer(index, self.capacity, self.now, keys, values)
        if not (on_gpu.available(keys.device) and on_gpu.stored(layer, self.targets, keys, values)):
            layer.flat_keys.index_copy_(0, self.targets, keys)
            layer.flat_values.index_copy_(0, self.targets, values)
        return layer

    def native_write(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer, NativeCall] | None:
        """The same as a call, for keys and values to come; None where they cannot be copied so."""
        layer = self.pools.layer(index, self.capacity, self.now, keys, values)
        known = self._stored.get(index)
        if known is None or not known.holds(layer, keys, values):
            known = self._stored[index] = StoredStates(layer, keys, values, self._step_slots)
        self.aim()
        return None if known.call is None else (layer, known.call)

    def aim(self) -> None:
        """Have the calls of `native_write` store the tokens of this step."""
        self._step_slots.put(self.targets)

    def close(self) -> None:
        """Let go of all tensors, whoever still has the layers."""
        self.pools.close()
        self.now = NO_TABLES
        self.forget_tables()
        self._stored.clear()
        self._swap = None
        self.targets = NO_TABLES.first
        self.aim()

    def forget_tables(self) -> None:
        """Keep no tensor of the last step: the next one's are made anew."""
        self._block_table, self._first = CachedTable(), CachedTensor()

    def lacks(self, sequence: int, tokens: int) -> bool:
        """Whether a page is gone that a query at position `tokens` sees."""
        return self.tables[sequence].first > self.seen_from(tokens) * self.page_size

    def trim(self, sequence: int, tokens: int) -> None:
        """Keep what tokens to come will need of the first `tokens` tokens."""
        table = self.tables[sequence]
        used = -(-(tokens - table.first) // self.page_size)
        if used < len(table.pages):
            self.allocator.release(table.cut(used))
        if self.window is None:
            return
        gone = max(0, self.seen_from(tokens) - table.first // self.page_size)
        self.allocator.release(table.advance(gone, gone * self.page_size))

    def fork(self, source: int, into: int) -> None:
        """`into` begins as `source`, sharing its pages until one of them writes."""
        table = self.tables[source]
        self.allocator.share(table.pages)
        self.tables[into] = Table(table.pages, table.first)

    def drop(self, sequence: int) -> None:
        if (table := self.tables.pop(sequence, None)) is not None:
            self.allocator.release(table.pages)


_EMPTY = Table()
