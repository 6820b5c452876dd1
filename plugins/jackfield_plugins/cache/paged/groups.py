"""The pages of the layers that remember alike: all full-attention layers, or all of one window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import PackedLayer, PackedStep, PageTables, Span, StepBlock
from jackfield_plugins.cache.paged.pages import PageAllocator
from jackfield_plugins.cache.paged.swapping import HostPages, PageSwap, swap_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from jackfield.contracts import Feed


@dataclass
class Table:
    """The pages of one sequence in one group; the first holds token `first`."""

    pages: list[int] = field(default_factory=list)
    first: int = 0


@dataclass(frozen=True)
class SwappedPages:
    """What the pages of one sequence held, in host memory: keys and values by layer."""

    count: int
    first: int
    layers: dict[int, HostPages]


class CachedTensor:
    """A small int32 tensor that is made anew only where its numbers are not those of last time.

    While all sequences decode, most of a step's tables are the ones of the step before.
    """

    def __init__(self) -> None:
        self._numbers: list[Any] | None = None

    def __call__(self, numbers: list[Any], block: StepBlock) -> torch.Tensor:
        if numbers != self._numbers:
            self._tensor = block.put(numbers, torch.int32)
            self._numbers = numbers
        return self._tensor


_NOBODY = torch.empty(0, dtype=torch.int32)


class LayerGroup:
    """Layers with one page table per sequence in common, each with a pool of its own.

    `window`: a layer of it sees the last `window` tokens only; pages before them are given back.
    """

    def __init__(self, window: int | None, page_size: int, capacity: int, fixed: bool) -> None:
        self.window = window
        self.page_size = page_size
        self.fixed = fixed
        self.allocator = PageAllocator(capacity)
        self.tables: dict[int, Table] = {}
        self.layers: dict[int, PackedLayer] = {}
        self._unseen: set[int] = set()  # layers whose pools were made before anything was written
        self._now: PageTables  # this step's
        self.targets: torch.Tensor  # the slots of this step's tokens, [tokens]
        self._block_table, self._first = CachedTensor(), CachedTensor()
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

    def missing(self, sequence: int, start: int, end: int) -> int:
        """How many pages `reserve` will take."""
        table = self.tables.get(sequence, _EMPTY)
        kept = table.pages[(start - table.first) // self.page_size :]
        shared = sum(map(self.allocator.is_shared, kept))
        return shared + max(0, -(-(end - table.first) // self.page_size) - len(table.pages))

    def missing_of(self, feeds: Seq[Feed]) -> int:
        """How many pages `reserve` will take for all of `feeds` together.

        Less than the sum where some that share a page write to it: each takes a copy, but the last
        one keeps it if nobody else holds it then.
        """
        count = 0
        writers: Counter[int] = Counter()
        for feed in feeds:
            table = self.tables.get(feed.sequence.id, _EMPTY)
            end = feed.start + feed.count + len(feed.drafts)
            count += max(0, -(-(end - table.first) // self.page_size) - len(table.pages))
            writers.update(table.pages[(feed.start - table.first) // self.page_size :])
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
        self.tables[sequence] = Table(list(pages), end - len(pages) * self.page_size)

    def publish(self, sequence: int, keys: Seq[bytes], begin: int) -> None:
        """Let the pages from the `begin`th on, counted from token 0, be found by `keys`."""
        table = self.tables[sequence]
        before = table.first // self.page_size
        for at in range(max(begin, before), len(keys)):
            self.allocator.publish(table.pages[at - before], keys[at])

    def save(self, sequence: int) -> SwappedPages:
        """A copy of a sequence's pages in host memory, on its way there maybe."""
        table = self.tables[sequence]
        if not table.pages or not self.layers:
            return SwappedPages(len(table.pages), table.first, {})
        if self._swap is None:
            self._swap = swap_on(next(iter(self.layers.values())).keys.device)
        layers = self._swap.out(table.pages, self.layers)
        return SwappedPages(len(table.pages), table.first, layers)

    def restore(self, sequence: int, saved: SwappedPages) -> None:
        """Take pages and put back what was saved."""
        table = self.tables[sequence] = Table([], saved.first)
        for _ in range(saved.count):
            table.pages.append(self._take(table.pages[-1] if table.pages else None))
        if saved.layers and self._swap is not None:
            self._swap.back(table.pages, self.layers, saved.layers)

    def reserve(self, sequence: int, start: int, end: int) -> None:
        """Make pages for tokens `start:end` of a sequence, none of them shared with another.

        Raises OutOfPagesError where the pool is fixed and full.
        """
        table = self.tables.setdefault(sequence, Table())
        missing = -(-(end - table.first) // self.page_size) - len(table.pages)
        for _ in range(missing):
            table.pages.append(self._take(table.pages[-1] if table.pages else None))
        written = range((start - table.first) // self.page_size, len(table.pages))
        for at in written:
            if self.allocator.is_shared(table.pages[at]):
                table.pages[at] = self._copy(table.pages[at])
        self._before_writing([table.pages[at] for at in written])

    def _before_writing(self, pages: list[int]) -> None:
        """A page may be on its way to host memory still, though nobody holds it any more."""
        if self._swap is not None:
            self._swap.before_writing(pages)

    def _take(self, after: int | None) -> int:
        if not self.fixed and self.allocator.num_free == 0:
            self._grow(2 * self.allocator.capacity)
        return self.allocator.take(after)

    def _grow(self, capacity: int) -> None:
        self.allocator.grow(capacity)
        for layer in self.layers.values():
            layer.replace(_resized(layer.keys, capacity), _resized(layer.values, capacity))

    def _copy(self, page: int) -> int:
        """Copy-on-write: a page of our own with the same tokens."""
        own = self._take(None)
        self._before_writing([own])
        for layer in self.layers.values():
            layer.keys[own] = layer.keys[page]
            layer.values[own] = layer.values[page]
        self.allocator.release([page])
        return own

    def lay_out(self, sequences: Seq[int], step: PackedStep, block: StepBlock) -> list[int]:
        """Point every layer of the group at the pages of this step's sequences.

        Returns the slots of the step's tokens, which the caller sets as `targets`. Tables are put
        into `block`, which the caller sends.
        """
        held = [self.tables[s] for s in sequences]
        longest = max(len(t.pages) for t in held)
        padded = [t.pages + [0] * (longest - len(t.pages)) for t in held]
        firsts = [t.first for t in held]
        self._now = PageTables(
            step,
            self.window,
            self.page_size,
            self._block_table(padded, block),
            self._first(firsts, block),
            [list(t.pages) for t in held],
            firsts,
        )
        for layer in self.layers.values():
            layer.tables = self._now
        return [
            slot for t, span in zip(held, step.spans, strict=True) for slot in self._slots(t, span)
        ]

    def _slots(self, table: Table, span: Span) -> Iterator[int]:
        """Where the new tokens of one sequence go."""
        size = self.page_size
        for at in range(span.end - span.length - table.first, span.end - table.first):
            yield table.pages[at // size] * size + at % size

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store `[tokens, kv_heads, head_dim]` of this step; returns what to attend to."""
        layer = self.layers.get(index)
        if layer is None or index in self._unseen:
            layer = self._first_written(index, layer, keys, values)
        layer.flat_keys.index_copy_(0, self.targets, keys)
        layer.flat_values.index_copy_(0, self.targets, values)
        return layer

    def allocate(
        self,
        index: int,
        keys: tuple[int, int],
        values: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the pools of a layer before anything is written."""
        pages = (self.allocator.capacity, self.page_size)
        made = [torch.zeros(*pages, *shape, dtype=dtype, device=device) for shape in (keys, values)]
        self.layers[index] = PackedLayer(made[0], made[1], _NONE)
        self._unseen.add(index)

    def _first_written(
        self, index: int, layer: PackedLayer | None, keys: torch.Tensor, values: torch.Tensor
    ) -> PackedLayer:
        """The layer, whose pools are made anew where these were not what was expected."""
        self._unseen.discard(index)
        if layer is not None:
            pairs = ((layer.keys, keys), (layer.values, values))
            if all(
                (pool.shape[2:], pool.dtype, pool.device) == (new.shape[1:], new.dtype, new.device)
                for pool, new in pairs
            ):
                return layer
            layer.replace(*(pool.new_empty(0, *pool.shape[1:]) for pool, _ in pairs))
        pages = (self.allocator.capacity, self.page_size)
        made = [states.new_zeros(*pages, *states.shape[1:]) for states in (keys, values)]
        self.layers[index] = PackedLayer(made[0], made[1], self._now)
        return self.layers[index]

    def close(self) -> None:
        """Let go of all tensors, whoever still has the layers."""
        for layer in self.layers.values():
            layer.replace(layer.keys.new_empty(0, 0, 0, 0), layer.values.new_empty(0, 0, 0, 0))
            layer.tables = _NONE
        self.layers.clear()
        self._now = _NONE
        self._block_table, self._first = CachedTensor(), CachedTensor()
        self._swap = None
        self.targets = torch.empty(0)

    def lacks(self, sequence: int, tokens: int) -> bool:
        """Whether a page is gone that a query at position `tokens` sees."""
        return self.tables[sequence].first > self.seen_from(tokens) * self.page_size

    def trim(self, sequence: int, tokens: int) -> None:
        """Keep what tokens to come will need of the first `tokens` tokens."""
        table = self.tables[sequence]
        used = -(-(tokens - table.first) // self.page_size)
        self.allocator.release(table.pages[used:])
        del table.pages[used:]
        if self.window is None:
            return
        gone = max(0, self.seen_from(tokens) - table.first // self.page_size)
        self.allocator.release(table.pages[:gone])
        del table.pages[:gone]
        table.first += gone * self.page_size

    def fork(self, source: int, into: int) -> None:
        """`into` begins as `source`, sharing its pages until one of them writes."""
        table = self.tables[source]
        self.allocator.share(table.pages)
        self.tables[into] = Table(list(table.pages), table.first)

    def drop(self, sequence: int) -> None:
        if (table := self.tables.pop(sequence, None)) is not None:
            self.allocator.release(table.pages)

    @property
    def num_bytes(self) -> int:
        """Memory of the pools, in bytes."""
        layers = list(self.layers.values())  # at once: another thread may ask in the first step
        tensors = [t for layer in layers for t in (layer.keys, layer.values)]
        return sum(t.numel() * t.element_size() for t in tensors)


_EMPTY = Table()
_NONE = PageTables(PackedStep([], _NOBODY, _NOBODY, 0, 0), None, 1, _NOBODY, _NOBODY, [], [])


def _resized(pool: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = pool.new_zeros(capacity, *pool.shape[1:])
    larger[: pool.shape[0]] = pool
    return larger
