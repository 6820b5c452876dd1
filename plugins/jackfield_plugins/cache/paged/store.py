"""The paged cache bound to a model: lays steps out in one row, keeps keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import (
    CacheUsage,
    ModelInputs,
    PackedKVCache,
    PackedLayer,
    PackedStep,
    Span,
    StepBlock,
)
from jackfield.errors import CacheFullError, ExecutionError
from jackfield_plugins.cache.paged.groups import CachedTensor, LayerGroup, SwappedPages
from jackfield_plugins.cache.paged.pages import OutOfPagesError
from jackfield_plugins.cache.paged.prefixes import PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import Sequence, Step


class PagedKVCache(PackedKVCache):
    """Pages for any number of sequences.

    `windows` has one entry per layer, its window or None. `num_tokens` fixes how many tokens the
    full-attention layers can hold; None lets the pools grow from `first_pages`. With
    `prefix_sharing`, pages are found by what they hold; with `swap`, an evicted sequence is copied
    to host memory and back. One that `forgets` keeps no pages once the last sequence has left: its
    weights may change then.
    """

    page_size: int

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
    ) -> None:
        self.page_size = page_size
        self.num_tokens = num_tokens
        self._block = StepBlock(device)
        pages = -(-num_tokens // page_size) if num_tokens else first_pages
        self.groups = {
            window: LayerGroup(window, page_size, pages, fixed=num_tokens is not None)
            for window in dict.fromkeys(windows)
        }
        self._group_of = [self.groups[window] for window in windows]
        self._starts = CachedTensor()
        self._expected = 0  # tokens of the step between `prepare` and `commit`
        self._running: dict[int, Sequence] = {}
        self._keys = PrefixKeys(page_size) if prefix_sharing else None
        self._published: dict[int, int] = {}  # how many full pages of a sequence can be found
        self._swap = swap
        self._forgets = forgets
        self._swapped: dict[
            int, tuple[int, list[SwappedPages]]
        ] = {}  # (tokens, what each group holds)
        self._prompt_tokens = self._prefix_tokens = 0

    @property
    def device(self) -> str:
        return str(self._block.device)

    def allocate(self, shapes: Seq[tuple[tuple[int, int], tuple[int, int]]], dtype: str) -> None:
        """Make the pools of all layers, whose keys and values are `(heads, head_dim)` each.

        Those of layers without a shape are made when the first token is written.
        """
        for index, (keys, values) in enumerate(shapes):
            if all((*keys, *values)):
                self._group_of[index].allocate(
                    index, keys, values, getattr(torch, dtype), self._block.device
                )

    def close(self) -> None:
        """Let go of the pools and of what was swapped out."""
        self._swapped.clear()
        self._block, self._starts = StepBlock(self._block.device), CachedTensor()
        for group in self.groups.values():
            group.close()

    def admit(self, sequence: Sequence) -> bool:
        if sequence.id in self._swapped:
            return self._swap_in(sequence)
        hits, pages = self._find_prefix(sequence)
        if not self._has_room(sequence, pages):
            return False
        for group, shared in zip(self.groups.values(), pages, strict=True):
            group.adopt(sequence.id, shared, hits)
        sequence.num_cached = hits
        self._published[sequence.id] = hits // self.page_size
        self._running[sequence.id] = sequence
        if not sequence.evictions:
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

    def _has_room(self, sequence: Sequence, shared: Seq[list[int]]) -> bool:
        """Whether what the sequence has so far fits beside what the others have so far.

        Each of the others keeps a page to grow into, so that nobody enters to be evicted at once.
        """
        if self.num_tokens is None or self._alone(sequence):
            return True
        tokens = len(sequence.tokens)
        for group, pages in zip(self.groups.values(), shared, strict=True):
            needed = group.pages_for(tokens, tokens, self.max_portion) - len(pages)
            revived = sum(map(group.allocator.is_kept, pages))
            owed = sum(self._owed(group, other) for other in self._running.values())
            if needed + revived + owed > group.allocator.num_free:
                return False
        return True

    def _alone(self, sequence: Sequence) -> bool:
        """Whether nobody runs but its own group, which was found to fit when it came."""
        return all(other in sequence.members for other in self._running.values())

    def _owed(self, group: LayerGroup, sequence: Sequence) -> int:
        """The pages that a running sequence still needs for what it has, and one to grow into."""
        tokens = len(sequence.tokens)
        missing = group.missing(sequence.id, sequence.num_cached, tokens)
        most = group.pages_for(tokens, tokens, self.max_portion)
        return 1 + min(missing, max(0, most - len(group.tables[sequence.id].pages)))

    def _swap_in(self, sequence: Sequence) -> bool:
        tokens, saved = self._swapped[sequence.id]
        alone = self._alone(sequence)
        for group, part in zip(self.groups.values(), saved, strict=True):
            owed = sum(self._owed(group, other) for other in self._running.values())
            if not alone and part.count + 1 + owed > group.allocator.num_free:
                return False
        for group, part in zip(self.groups.values(), saved, strict=True):
            group.restore(sequence.id, part)
        del self._swapped[sequence.id]
        sequence.num_cached = tokens
        self._running[sequence.id] = sequence
        return True

    def evict(self, sequence: Sequence) -> None:
        if self._swap:
            saved = [group.save(sequence.id) for group in self.groups.values()]
            self._swapped[sequence.id] = (sequence.num_cached, saved)
        self._drop(sequence)
        sequence.num_cached = 0

    def portions(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """As wanted, or as much as the pool of a window holds, which may be less than a prompt."""
        if self.num_tokens is None:
            return wanted
        return [
            min(count, *(g.largest(s.id, s.num_cached) for g in self.groups.values()))
            for s, count in zip(sequences, wanted, strict=True)
        ]

    def fits(self, step: Step) -> bool:
        if self.num_tokens is None:
            return True
        return all(
            sum(
                group.missing(f.sequence.id, f.start, f.start + f.count + len(f.drafts))
                for f in step.feeds
            )
            <= group.allocator.num_free
            or group.missing_of(step.feeds) <= group.allocator.num_free
            for group in self.groups.values()
        )

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        tokens = prompt_length + max_new_tokens - 1
        size = (tokens, prompt_length, self.max_portion)
        groups = self.groups.values()
        if self.num_tokens is None or all(
            copies * group.pages_for(*size) <= group.allocator.capacity for group in groups
        ):
            return None
        needed = max(group.places_for(*size) for group in groups)
        if copies > 1:  # share no page once they were evicted; each ends with a page of its own
            needed = copies * -(-needed // self.page_size) * self.page_size
        each = "" if copies == 1 else f", each of {copies} beams by itself,"
        return (
            f"{prompt_length} prompt tokens and up to {max_new_tokens} new ones{each} need "
            f"{needed} places, and it holds {self.num_tokens}; {self._smaller(size, copies)}, or "
            f"select 'paged?num_tokens={needed}'"
        )

    def _smaller(self, size: tuple[int, int, int | None], copies: int) -> str:
        """What makes such a request need less."""
        tokens, prompt, _ = size
        if all(
            copies * g.pages_for(tokens, prompt, 1) <= g.allocator.capacity
            for g in self.groups.values()
        ):
            return "feed the prompt in pieces (prefill_chunk_size)"
        return "lower max_new_tokens" + (" or num_beams" if copies > 1 else "")

    def prepare(self, step: Step) -> ModelInputs:
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for feed in step.feeds:
            tokens = feed.token_ids
            end = feed.start + len(tokens)
            spans.append(Span(len(ids), len(tokens), end))
            ids += tokens
            positions += range(feed.start, end)
            self._reserve(feed.sequence, feed.start, end)
        packed = self._packed_step(spans)
        numbers = [feed.sequence.id for feed in step.feeds]
        groups = self.groups.values()
        slots = [group.lay_out(numbers, packed, self._block) for group in groups]
        # One tensor for all that changes with every step: a small one costs as much as its call.
        table = self._block.put([ids, positions, *slots])
        for row, group in enumerate(groups):
            group.targets = table[2 + row]
        keep = 1 + max(len(feed.drafts) for feed in step.feeds)
        kwargs: dict[str, Any] = {
            "input_ids": table[:1],
            "position_ids": table[1:2],
            "use_cache": False,
            "logits_to_keep": self._wanted(spans, keep, len(ids)),
        }
        self._block.send()
        self._expected = len(ids)
        return ModelInputs(kwargs, rows=len(spans), decode=step.decode)

    def _wanted(self, spans: list[Span], keep: int, tokens: int) -> int | torch.Tensor:
        """Which logits to compute: of the last `keep` tokens of every sequence.

        A number where these are the step's last tokens, as with one sequence and while all decode:
        models slice by it, which is cheaper than picking rows.
        """
        if len(spans) == 1 or tokens == len(spans):
            return keep * len(spans)
        last = [max(0, s.start + s.length - keep + i) for s in spans for i in range(keep)]
        return self._block.put(last)

    def _reserve(self, sequence: Sequence, start: int, end: int) -> None:
        try:
            for group in self.groups.values():
                group.reserve(sequence.id, start, end)
        except OutOfPagesError:
            raise CacheFullError(
                f"the paged cache holds {self.num_tokens} tokens and is full; give it more with "
                "'paged?num_tokens=…', or send fewer or shorter requests"
            ) from None

    def _packed_step(self, spans: list[Span]) -> PackedStep:
        starts = [span.start for span in spans] + [spans[-1].start + spans[-1].length]
        return PackedStep(
            spans,
            self._starts(starts, self._block),
            self._block.put([s.end for s in spans], torch.int32),
            max(span.length for span in spans),
            max(span.end for span in spans),
        )

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        if len(keys) != self._expected:
            raise ExecutionError(
                f"the model was called with {len(keys)} tokens by somebody else than its engine; "
                "close the engine first, or load it with cache_implementation='dynamic'"
            )
        return self._group_of[layer].write(layer, keys, values)

    def commit(self, step: Step, kept: Seq[int]) -> None:
        self._expected = 0
        for feed, count in zip(step.feeds, kept, strict=True):
            sequence = feed.sequence
            sequence.num_cached = feed.start + count
            if self._keys is not None:
                self._publish(self._keys, sequence)
            for group in self.groups.values():
                group.trim(sequence.id, sequence.num_cached)

    def _publish(self, keys: PrefixKeys, sequence: Sequence) -> None:
        """Let what it has filled be found. Accepted drafts become tokens after this, so later."""
        begin = self._published.get(sequence.id, 0)
        full = min(sequence.num_cached, len(sequence.tokens)) // self.page_size
        if full > begin:
            chain = keys.of(sequence, full)[:full]
            for group in self.groups.values():
                group.publish(sequence.id, chain, begin)
            self._published[sequence.id] = full

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Forgets it where a window has let go of pages that are seen again, or others see them."""
        shared = tokens < self._published[sequence.id] * self.page_size
        if shared or any(group.lacks(sequence.id, tokens) for group in self.groups.values()):
            self._drop(sequence)
            sequence.num_cached = 0
            return
        for group in self.groups.values():
            group.trim(sequence.id, tokens)
        sequence.num_cached = tokens

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        """Pages are shared until one writes."""
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
        for sequence in sequences:
            self._swapped.pop(sequence.id, None)
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._running.pop(sequence.id, None)
        self._published.pop(sequence.id, None)
        if self._keys is not None:
            self._keys.drop(sequence)
        for group in self.groups.values():
            group.drop(sequence.id)
            if self._forgets and not self._running:
                group.allocator.forget()

    def forget(self) -> None:
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
            num_bytes=self.num_bytes,
        )

    def held_bytes(self) -> int:
        return sum(
            group.num_bytes * (pool.capacity - pool.num_free) // pool.capacity
            for group in self.groups.values()
            for pool in (group.allocator,)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all pools, in bytes."""
        return sum(group.num_bytes for group in self.groups.values())
