"""The paged cache bound to a model: lays steps out in one row, keeps keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import ModelInputs, PackedKVCache, PackedLayer, PackedStep, Span
from jackfield.errors import CacheFullError
from jackfield_plugins.cache.paged.groups import Kept, LayerGroup
from jackfield_plugins.cache.paged.pages import OutOfPagesError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.sequences import Sequence, Step


class PagedKVCache(PackedKVCache):
    """Pages for any number of sequences.

    `windows` has one entry per layer, its window or None. `num_tokens` fixes how many tokens the
    full-attention layers can hold; None lets the pools grow.
    """

    def __init__(
        self,
        windows: Seq[int | None],
        page_size: int,
        num_tokens: int | None,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_tokens = num_tokens
        self._device = device
        pages = -(-num_tokens // page_size) if num_tokens else 64
        self.groups = {
            window: LayerGroup(window, page_size, pages, fixed=num_tokens is not None)
            for window in dict.fromkeys(windows)
        }
        self._group_of = [self.groups[window] for window in windows]
        self._starts = Kept()
        self._claims: dict[int, list[int]] = {}  # of those that run: most pages, group by group

    def room(self, waiting: Seq[Sequence]) -> int | None:
        """As many as can all grow to their end beside those that run."""
        if self.num_tokens is None:
            return None
        free = [group.allocator.capacity for group in self.groups.values()]
        for claim in self._claims.values():
            free = [pages - most for pages, most in zip(free, claim, strict=True)]
        fitting = 0
        for sequence in waiting:
            claim = self._claim(sequence)
            free = [pages - most for pages, most in zip(free, claim, strict=True)]
            if min(free) < 0:
                break
            fitting += 1
        return fitting if self._claims else max(1, fitting)  # too long by itself: see `_reserve`

    def _claim(self, sequence: Sequence) -> list[int]:
        """The most pages it can come to hold, group by group."""
        tokens = sequence.prompt_length + sequence.settings.max_new_tokens - 1
        return [
            group.pages_for(tokens, len(sequence.tokens), self.prefill_chunk_size)
            for group in self.groups.values()
        ]

    def refuse(self, prompt_length: int, max_new_tokens: int) -> str | None:
        tokens = prompt_length + max_new_tokens - 1
        size = (tokens, prompt_length, self.prefill_chunk_size)
        groups = self.groups.values()
        if self.num_tokens is None or all(
            group.pages_for(*size) <= group.allocator.capacity for group in groups
        ):
            return None
        needed = max(group.places_for(*size) for group in groups)
        return (
            f"{prompt_length} prompt tokens and up to {max_new_tokens} new ones need {needed} "
            f"places, and it holds {self.num_tokens}; {self._smaller(size)}, or select "
            f"'paged?num_tokens={needed}'"
        )

    def _smaller(self, size: tuple[int, int, int | None]) -> str:
        """What makes such a request need less."""
        tokens, prompt, _ = size
        if all(
            g.pages_for(tokens, prompt, 1) <= g.allocator.capacity for g in self.groups.values()
        ):
            return "feed the prompt in pieces (prefill_chunk_size)"
        return "lower max_new_tokens"

    def prepare(self, step: Step) -> ModelInputs:
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        self._claims |= {
            feed.sequence.id: self._claim(feed.sequence)
            for feed in step.feeds
            if feed.sequence.id not in self._claims
        }
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
        slots = [group.lay_out(numbers, packed, self._device) for group in groups]
        # One tensor for all that changes with every step: a small one costs as much as its call.
        table = torch.tensor([ids, positions, *slots], device=self._device)
        for row, group in enumerate(groups):
            group.targets = table[2 + row]
        keep = 1 + max(len(feed.drafts) for feed in step.feeds)
        kwargs: dict[str, Any] = {
            "input_ids": table[:1],
            "position_ids": table[1:2],
            "use_cache": False,
            "logits_to_keep": self._wanted(spans, keep, len(ids)),
        }
        return ModelInputs(kwargs, rows=len(spans))

    def _wanted(self, spans: list[Span], keep: int, tokens: int) -> int | torch.Tensor:
        """Which logits to compute: of the last `keep` tokens of every sequence.

        A number where these are the step's last tokens, as with one sequence and while all decode:
        models slice by it, which is cheaper than picking rows.
        """
        if len(spans) == 1 or tokens == len(spans):
            return keep * len(spans)
        last = [max(0, s.start + s.length - keep + i) for s in spans for i in range(keep)]
        return torch.tensor(last, device=self._device)

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
            self._starts(starts, self._device),
            torch.tensor([s.end for s in spans], dtype=torch.int32, device=self._device),
            max(span.length for span in spans),
            max(span.end for span in spans),
        )

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        return self._group_of[layer].write(layer, keys, values)

    def commit(self, step: Step, kept: Seq[int]) -> None:
        for feed, count in zip(step.feeds, kept, strict=True):
            feed.sequence.num_cached = feed.start + count
            for group in self.groups.values():
                group.trim(feed.sequence.id, feed.sequence.num_cached)

    def fork(self, source: Sequence, into: Sequence) -> None:
        """`into` begins with what is cached of `source`; pages are shared until one writes."""
        for group in self.groups.values():
            group.fork(source.id, into.id)
        into.num_cached = source.num_cached

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._claims.pop(sequence.id, None)
            for group in self.groups.values():
                group.drop(sequence.id)

    @property
    def num_bytes(self) -> int:
        """Memory of all pools, in bytes."""
        return sum(group.num_bytes for group in self.groups.values())
