"""Cache `counted-pages`: keys and values in pages, all tokens of a step in one row, no padding.

After PagedAttention (Kwon et al. 2023, arXiv:2309.06180). A sequence has a list of pages, the same
ones in every layer; token t is in page t // page_size of its list, at place t % page_size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    CacheUsage,
    ModelInputs,
    PackedKVCache,
    PackedLayer,
    PackedStep,
    PageTables,
    Requirements,
    Sequence,
    Span,
    Step,
    known,
)
from jackfield.contracts.requirements import BYTES

if TYPE_CHECKING:  # this module is imported whenever jackfield looks for backends: keep it light
    import torch


@dataclass(frozen=True)
class Options:
    """The keys of `plugin:counted-pages?key=value`; their types are checked.

    `num_tokens`: how many tokens of all sequences fit. `page_size`: how many are in a page.
    """

    num_tokens: int = 8192
    page_size: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= self.num_tokens:
            raise ValueError(
                f"page_size must be from 1 to num_tokens={self.num_tokens}, not {self.page_size}"
            )

    @property
    def pages(self) -> int:
        return self.num_tokens // self.page_size


class Pages(PackedKVCache):
    """What the loop calls: `admit`; in each step `fits`, `prepare`, `write`, `commit`; `release`.

    All of it runs in one thread. Of a sequence only `num_cached` is ever set.
    """

    def __init__(self, options: Options, windows: Seq[int | None], device: torch.device) -> None:
        self.page_size = options.page_size
        self._num_pages, self._windows, self._device = options.pages, windows, device
        self._free = list(range(options.pages))
        self._pages: dict[int, list[int]] = {}  # of each sequence, by its id
        self._layers: dict[int, PackedLayer] = {}  # with the pools of each layer
        self._tables: dict[int | None, PageTables] = {}  # of this step, by window
        self._prompt_tokens = 0  # of all that entered
        self._slots: torch.Tensor  # where the tokens of this step go: page · page_size + place

    def admit(self, sequence: Sequence) -> bool:
        """Take its pages now, so that no other can have them while its prompt is read."""
        if self._missing(sequence, len(sequence.tokens)) > len(self._free):
            return False  # asked again later
        self._take(sequence, len(sequence.tokens))
        self._prompt_tokens += sequence.prompt_length
        sequence.num_cached = 0  # nothing of it is here; a prefix cache would say how much is
        return True

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        """What could never fit is refused when the request is made."""
        tokens, room = prompt_length + max_new_tokens - 1, self._num_pages * self.page_size
        if tokens <= room:
            return None
        return f"{tokens} tokens are more than its {room}; see 'counted-pages?num_tokens=…'"

    def fits(self, step: Step) -> bool:
        """Where it says no, the loop leaves out drafts, then preempts a sequence."""
        wanted = (self._missing(s.sequence, s.start + len(s.token_ids)) for s in step.scheduled)
        return sum(wanted) <= len(self._free)

    def prepare(self, step: Step) -> ModelInputs:
        """Lay out the step's tokens in one row, and say which pages each sequence has."""
        import torch

        ids: list[int] = []
        positions: list[int] = []
        spans, keep, slots = [], [], []
        last = 1 + max(len(one.drafts) for one in step.scheduled)  # logits wanted of each
        for one in step.scheduled:
            fed, end = one.token_ids, one.start + len(one.token_ids)
            self._take(one.sequence, end)
            spans.append(Span(len(ids), len(fed), end))
            ids += fed
            positions += range(one.start, end)
            keep += [max(0, len(ids) - last + i) for i in range(last)]
            pages = self._pages[one.sequence.id]
            slots += [
                pages[at // self.page_size] * self.page_size + at % self.page_size
                for at in range(one.start, end)
            ]

        def tensor(numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self._device)

        self._slots = tensor(slots)
        packed = PackedStep(
            spans,
            cu_seqlens_q=tensor([*(span.query_start for span in spans), len(ids)], torch.int32),
            seq_lens=tensor([span.kv_len for span in spans], torch.int32),
            max_seqlen_q=max(span.query_len for span in spans),
            max_seqlen_k=max(span.kv_len for span in spans),
        )
        tables = [list(self._pages[one.sequence.id]) for one in step.scheduled]
        longest = max(map(len, tables))
        padded = tensor([row + [0] * (longest - len(row)) for row in tables], torch.int32)
        firsts = [0] * len(tables)  # nothing is let go of, so the first page has token 0
        self._tables = {
            window: PageTables(
                packed, window, self.page_size, padded, tensor(firsts, torch.int32), tables, firsts
            )
            for window in set(self._windows)
        }
        kwargs = {
            "input_ids": tensor([ids]),
            "position_ids": tensor([positions]),
            "use_cache": False,  # transformers keeps nothing; `write` is the cache
            "logits_to_keep": tensor(keep),
        }
        return ModelInputs(kwargs, rows=len(spans), decode=step.decode)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store `[tokens, kv_heads, head_dim]` of this step; called once a layer."""
        tables = self._tables[self._windows[layer]]
        if layer not in self._layers:  # the first keys tell how many heads there are, of what size
            shape = (self._num_pages, self.page_size)
            pools = (states.new_zeros(*shape, *states.shape[1:]) for states in (keys, values))
            self._layers[layer] = PackedLayer(*pools, tables)
        here = self._layers[layer]
        here.tables = tables
        here.flat_keys[self._slots] = keys
        here.flat_values[self._slots] = values
        return here

    def commit(self, step: Step, kept: Seq[int]) -> None:
        """Keep so many tokens of each. Pages of rejected drafts are given back."""
        for one, count in zip(step.scheduled, kept, strict=True):
            one.sequence.num_cached = one.start + count
            # Not below what was taken for it in `admit`: its prompt may still be read.
            self._cut(one.sequence, max(one.start + count, len(one.sequence.tokens)))

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._free += self._pages.pop(sequence.id, [])

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """As a draft model's cache: what was guessed wrong is taken back, the rest stays."""
        self._cut(sequence, tokens)
        sequence.num_cached = tokens

    def usage(self) -> CacheUsage:
        """For statistics; asked in other threads, too."""
        layers = list(self._layers.values())
        return CacheUsage(
            pages=self._num_pages,
            pages_used=self._num_pages - len(self._free),
            pages_kept=0,
            page_size=self.page_size,
            prompt_tokens=self._prompt_tokens,
            prefix_tokens=0,
            swapped=0,
            num_bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        )

    def held_bytes(self) -> int:
        """The pages of running sequences, whole ones."""
        used = sum(map(len, self._pages.values()))
        pools = [pool for layer in self._layers.values() for pool in (layer.keys, layer.values)]
        return used * sum(pool[0].nbytes for pool in pools)

    def close(self) -> None:
        self._layers.clear()

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        """How many pages it lacks for so many tokens."""
        return max(0, -(-tokens // self.page_size) - len(self._pages.get(sequence.id, ())))

    def _take(self, sequence: Sequence, tokens: int) -> None:
        pages = self._pages.setdefault(sequence.id, [])
        for _ in range(self._missing(sequence, tokens)):
            pages.append(self._free.pop())

    def _cut(self, sequence: Sequence, tokens: int) -> None:
        pages, count = self._pages[sequence.id], -(-tokens // self.page_size)
        self._free += pages[count:]
        del pages[count:]


class CountedPagesBackend(Cache):
    """What is declared here is what `jackfield check` proves; anything else is refused."""

    name = "counted-pages"
    options = Options
    capabilities = CacheCapabilities(
        layout="packed",
        layer_types=frozenset({"full_attention", "sliding_attention"}),
        rollback=frozenset({"full_attention", "sliding_attention"}),
    )

    def request_bytes(self, requirements: Requirements, options: Any, tokens: int) -> int | None:
        """What a request of so many tokens holds: pages count whole."""
        return self._page_bytes(requirements, options, -(-tokens // options.page_size))

    def pool_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """What all requests share."""
        return self._page_bytes(requirements, options, options.pages)

    def _page_bytes(self, requirements: Requirements, options: Any, pages: int) -> int | None:
        numbers = requirements.packed_numbers  # of a token in each layer, where that is known
        size = pages * options.page_size * BYTES[requirements.dtype]
        return size * sum(numbers) if known(requirements, numbers) else None

    def bind(self, context: BindContext) -> Pages:
        return Pages(context.options, context.requirements.windows, context.device)


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [CountedPagesBackend()]
