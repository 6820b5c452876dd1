"""The paged cache bound to a model: lays steps out in one row, keeps keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jackfield.contracts import (
    CacheUsage,
    FixedStep,
    ModelInputs,
    PackedKVCache,
    PackedLayer,
    free_bytes,
)
from jackfield.errors import CacheFullError, ExecutionError
from jackfield_plugins.cache.paged.fixed import MOST_TOKENS, FixedPlace, Rows
from jackfield_plugins.cache.paged.groups import LayerGroup
from jackfield_plugins.cache.paged.layout import StepLayout
from jackfield_plugins.cache.paged.pages import OutOfPagesError
from jackfield_plugins.cache.paged.prefixes import PrefixKeys
from jackfield_plugins.cache.paged.room import Room
from jackfield_plugins.cache.paged.storing import on_gpu
from jackfield_plugins.cache.paged.swapped import SwappedSequences

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import NativeCall, Sequence, Step


class PagedKVCache(PackedKVCache):
    """Pages for any number of sequences.

    `windows` has one entry per layer, its window or None. `num_tokens` fixes how many tokens the
    full-attention layers can hold; None lets the pools grow from `first_pages`. With
    `prefix_sharing`, pages are found by what they hold; with `swap`, a preempted sequence is copied
    to host memory and back, as long as there is room for it. One that `forgets` keeps no pages once
    the last sequence has left: its weights may change then. With `spare`, pools of a fixed size
    have a page more, which steps at fixed places need; they hold sequences of up to `longest`
    tokens. A step feeds `chunk` tokens of a sequence at most; None: any number.
    """

    page_size: int
    overlaps = True

    def __init__(
        self,
        windows: Seq[int | None],
        page_size: int,
        num_tokens: int | None,
        device: torch.device,
        *,
        prefix_sharing: bool = False,
        swap: bool = False,
        forgets: bool = False,
        first_pages: int = 64,
        spare: bool = False,
        longest: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_tokens = num_tokens
        self._device = device
        pages = -(-num_tokens // page_size) if num_tokens else first_pages
        self.groups = {
            window: LayerGroup(
                window, page_size, pages, num_tokens is not None, spare=spare and bool(num_tokens)
            )
            for window in dict.fromkeys(windows)
        }
        self._group_of = [self.groups[window] for window in windows]
        self._layout = StepLayout(self.groups.values(), device)
        self._fixed: list[FixedPlace] = []  # the smallest first
        self._longest = MOST_TOKENS if longest is None else longest
        self._expected = 0  # tokens of the step that is prepared and not committed, or recorded
        self._running: dict[int, Sequence] = {}
        self._room = Room(self.groups.values(), num_tokens, self._running, chunk)
        self._keys = PrefixKeys(page_size) if prefix_sharing else None
        self._published: dict[int, int] = {}  # how many full pages of a sequence can be found
        self._swap = swap
        self._forgets = forgets
        self._swapped = SwappedSequences(self.groups.values())
        self._prompt_tokens = self._prefix_tokens = 0

    @property
    def device(self) -> str:
        return str(self._device)

    def allocate(self, shapes: Seq[tuple[tuple[int, int], tuple[int, int]]], dtype: str) -> None:
        """Make the pools of all layers, whose keys and values are `(heads, head_dim)` each.

        Those of layers without a shape are made when the first token is written.
        """
        grows = self.num_tokens is None and self._device.type == "cpu" and len(shapes) > 0
        # A window needs little of its room; addresses cost nothing, so it has as much as the rest.
        whole = sum(group.window is None for group in self._group_of) or len(self._group_of)
        room = (free_bytes("cpu") or 0) // (2 * whole) if grows else 0
        for index, (keys, values) in enumerate(shapes):
            if all((*keys, *values)):
                group = self._group_of[index]
                group.pools.allocate(
                    index,
                    group.capacity,
                    keys,
                    values,
                    getattr(torch, dtype),
                    self._device,
                    room,
                )
                on_gpu.warm(self._device, getattr(torch, dtype), keys, values)

    def close(self) -> None:
        """Let go of the pools and of what was swapped out."""
        self._swapped.close()
        self._fixed.clear()
        self._layout = StepLayout(self.groups.values(), self._device)
        for group in self.groups.values():
            group.close()

    def admit(self, sequence: Sequence) -> bool:
        if sequence.id in self._swapped:
            if not self._room.for_swapped(sequence, self._swapped.pages(sequence.id)):
                return False
            if (tokens := self._swapped.back(sequence.id)) is not None:
                sequence.num_cached = tokens
                self._running[sequence.id] = sequence
                return True
        hits, pages = self._find_prefix(sequence)
        if not self._room.for_more(sequence, pages):
            return False
        for group, shared in zip(self.groups.values(), pages, strict=True):
            group.adopt(sequence.id, shared, hits)
        sequence.num_cached = hits
        self._published[sequence.id] = hits // self.page_size
        self._running[sequence.id] = sequence
        if not sequence.preemptions:
            self._prompt_tokens += sequence.prompt_length
            self._prefix_tokens += hits
        return True

    def _find_prefix(self, sequence: Sequence) -> tuple[int, list[list[int]]]:
        """How many of its first tokens are there already, and in which pages of each group.

        At least its last token is left to be fed: what comes next has to be computed.
        """
        groups = list(self.groups.values())
        if self._keys is not None:
            whole = (len(sequence.tokens) - 1) // self.page_size
            keys = self._keys.of(sequence, whole)
            whole = min(group.known(keys[:whole]) for group in groups)
            while any(group.find(keys[:whole]) is None for group in groups):
                whole -= 1  # ends at 0: nothing is found of nothing
            return whole * self.page_size, [group.find(keys[:whole]) or [] for group in groups]
        return 0, [[] for _ in groups]

    def preempt(self, sequence: Sequence) -> None:
        if self._swap:
            self._swapped.out(sequence.id, sequence.num_cached)
        self._drop(sequence)
        sequence.num_cached = 0

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        return self._room.adjust_schedule(sequences, wanted)

    def fits(self, step: Step) -> bool:
        return self._room.for_step(step)

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        return self._room.refuse(prompt_length, max_new_tokens, copies)

    def prepare(self, step: Step) -> ModelInputs:
        self._expected = 0
        for item in step.scheduled:
            end = item.start + item.num_tokens + len(item.drafts)
            self._reserve(item.sequence.id, item.start, end)
        if (found := self._place_for(step)) is not None:
            place, rows = found
            inputs, self._expected = place.prepare(rows), place.rows
            return inputs
        inputs, self._expected = self._layout.inputs(step)
        return inputs

    def _place_for(self, step: Step) -> tuple[FixedPlace, Rows] | None:
        """Where a step lies that is laid out at a fixed place, and its rows; None: anywhere."""
        if not (self._fixed and step.decode) or any(item.drafts for item in step.scheduled):
            return None
        rows = Rows.of(step)
        return next(((place, rows) for place in self._fixed if place.holds(rows)), None)

    def fix(self, rows: int) -> FixedStep:
        groups = list(self.groups.values())
        if not all(group.spare for group in groups):
            raise ExecutionError("the pages of this cache move; give it a fixed size")
        place = FixedPlace(rows, groups, self._longest, self._layout.block)
        self.loosen(rows)
        self._fixed = sorted([*self._fixed, place], key=lambda place: place.rows)
        self._expected = rows
        place.enter()
        return place.step

    def loosen(self, rows: int) -> None:
        self._fixed = [place for place in self._fixed if place.rows != rows]

    def _reserve(self, sequence: int, start: int, end: int) -> None:
        try:
            for group in self.groups.values():
                group.reserve(sequence, start, end)
        except OutOfPagesError:
            raise CacheFullError(
                f"the paged cache holds {self.num_tokens} tokens and is full; give it more with "
                "'paged?num_tokens=…', or send fewer or shorter requests"
            ) from None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        if len(keys) != self._expected:
            raise ExecutionError(
                f"the model was called with {len(keys)} tokens by somebody else than its engine; "
                "close the engine first, or load it with cache_implementation='dynamic'"
            )
        return self._group_of[layer].write(layer, keys, values)

    def native_write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer, NativeCall] | None:
        if len(keys) != self._expected:
            return None  # which `write` refuses
        return self._group_of[layer].native_write(layer, keys, values)

    def native_again(self, tokens: int) -> bool:
        if tokens != self._expected:
            return False  # which `write` refuses
        for group in self.groups.values():
            group.aim()
        return True

    def commit(self, step: Step, kept: Seq[int]) -> None:
        self._expected = 0
        self._room.recount()
        keys, size, published = self._keys, self.page_size, self._published
        for item, count in zip(step.scheduled, kept, strict=True):
            sequence = item.sequence
            end = sequence.num_cached = item.start + count
            if keys is not None and end // size > published.get(sequence.id, 0):
                self._publish(keys, sequence)
            for group in self.groups.values():
                group.trim(sequence.id, end)

    def _publish(self, keys: PrefixKeys, sequence: Sequence) -> None:
        """Let what it has filled be found. Accepted drafts become tokens after this, so later."""
        begin = self._published.get(sequence.id, 0)
        full = min(sequence.num_cached, len(sequence.tokens)) // self.page_size
        if full > begin:
            chain = keys.of(sequence, full)[:full]
            for group in self.groups.values():
                group.publish(sequence.id, chain, begin)
            self._published[sequence.id] = full

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Forgets it where a window has let go of pages that are seen again, or others see them."""
        self._room.recount()
        shared = tokens < self._published.get(sequence.id, 0) * self.page_size
        if shared or any(group.lacks(sequence.id, tokens) for group in self.groups.values()):
            self._drop(sequence)
            sequence.num_cached = 0
            return
        for group in self.groups.values():
            group.trim(sequence.id, tokens)
        sequence.num_cached = tokens

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        """Pages are shared until one writes."""
        self._room.recount()
        for sequence in dropped:
            self._drop(sequence)
        for source, into in copies:
            for group in self.groups.values():
                group.fork(source.id, into.id)
            into.num_cached = source.num_cached
            self._running[into.id] = into
            self._published[into.id] = self._published.get(source.id, 0)
            if self._keys is not None:
                self._keys.fork(source, into)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._expected = 0  # a step that failed after `prepare` ends here
        for sequence in sequences:
            self._swapped.forget(sequence.id)
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._running.pop(sequence.id, None)
        self._room.recount()
        self._published.pop(sequence.id, None)
        if self._keys is not None:
            self._keys.drop(sequence)
        for group in self.groups.values():
            group.drop(sequence.id)
            if self._forgets and not self._running:
                group.allocator.forget()

    def forget(self) -> None:
        self._expected = 0
        for group in self.groups.values():
            group.allocator.forget()

    def usage(self) -> CacheUsage:
        pools = [group.allocator for group in self.groups.values()]
        kept = sum(pool.num_kept for pool in pools)
        return CacheUsage(
            pages=sum(pool.capacity for pool in pools),
            pages_used=sum(pool.capacity - pool.num_free for pool in pools),
            pages_kept=kept,
            page_size=self.page_size,
            prompt_tokens=self._prompt_tokens,
            prefix_tokens=self._prefix_tokens,
            swapped=len(self._swapped),
            not_swapped=self._swapped.refused,
            num_bytes=self.num_bytes,
        )

    def held_bytes(self) -> int:
        return sum(
            group.pools.num_bytes * (pool.capacity - pool.num_free) // group.capacity
            for group in self.groups.values()
            for pool in (group.allocator,)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all pools, in bytes."""
        return sum(group.pools.num_bytes for group in self.groups.values())
