"""``paged``: keys and values in pages, all tokens of a step in one row, nothing padded."""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    KVCache,
    Requirements,
    free_bytes,
    in_units,
    known,
)
from jackfield.contracts.requirements import BYTES
from jackfield.errors import CacheFullError

if TYPE_CHECKING:
    from jackfield_plugins.cache.paged.store import PagedKVCache

logger = logging.getLogger("jackfield")

#: In tokens, where nobody asks for another.
PAGE_SIZE = 32
#: As many keys as a program of the Triton attention takes at a time: it is 1.16 times as fast for
#: long prompts as with 32 (NVIDIA H200, bfloat16, heads of 128).
PAGE_SIZE_ON_GPU = 64

#: Of a pool that grows as needed: how many pages it begins with.
FIRST_PAGES = 64


@dataclass(frozen=True)
class PagedOptions:
    """How the pages are cut, and what becomes of those that nobody holds.

    `page_size` in tokens; None: 32, on a GPU 64, or more where the attention reads larger pages in
    place.
    `num_tokens`: how many tokens fit at all. `memory`: the same as a share of what is free on the
    device once the weights are there; without either, 0.9 on a GPU, and on the CPU the pools grow
    as needed.
    `prefix_sharing`: prompts that begin alike share pages; None: unless deterministic. `swap`: a
    preempted sequence is copied to host memory instead of computed again, as long as there is room;
    None: where the device is not the CPU, and one process has the model.
    """

    page_size: int | None = None
    num_tokens: int | None = None
    memory: float | None = None
    prefix_sharing: bool | None = None
    swap: bool | None = None

    def __post_init__(self) -> None:
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.num_tokens is not None and self.num_tokens < (size := self.page_size or PAGE_SIZE):
            raise ValueError(f"num_tokens={self.num_tokens} is less than one page of {size} tokens")
        if self.memory is not None and not 0 < self.memory <= 1:
            raise ValueError(f"memory must be a share above 0 and at most 1, not {self.memory}")
        if self.memory is not None and self.num_tokens is not None:
            raise ValueError("num_tokens and memory say the same; give one of them")


#: Those of this process that took a share of what was free, and are still open.
_measured: weakref.WeakSet[PagedKVCache] = weakref.WeakSet()


def _held_by_others(device: str) -> list[int]:
    """What pools of other engines take on a device, in bytes."""
    found = (cache.num_bytes for cache in list(_measured) if cache.device == device)
    return [size for size in found if size]


def _beside(others: list[int]) -> str:
    if not others:
        return ""
    who = "another engine" if len(others) == 1 else f"{len(others)} other engines"
    return (
        f", beside {in_units(sum(others))} for {who} of this process; for equal parts load each "
        f"with 'paged?num_tokens=…', or the first with 'paged?memory={0.9 / (len(others) + 1):.2g}'"
    )


def _share(requirements: Requirements, options: Any) -> float | None:
    """The part of the free memory that the pools take from the start; None: it is not by that."""
    if options.num_tokens is not None:
        return None
    if options.memory is None and requirements.device != "cpu":
        return 0.9
    return options.memory  # type: ignore[no-any-return]


def _page_size(requirements: Requirements, options: Any) -> int:
    if options.page_size is not None:
        return int(options.page_size)
    usual = PAGE_SIZE_ON_GPU if requirements.device == "cuda" else PAGE_SIZE
    return math.lcm(usual, requirements.page_multiple)


class PagedCache(Cache):
    """After PagedAttention (Kwon et al. 2023, arXiv:2309.06180)."""

    name = "paged"
    options = PagedOptions
    capabilities = CacheCapabilities(
        layout="packed",
        layer_types=frozenset({"full_attention", "sliding_attention"}),
        rollback=frozenset({"full_attention", "sliding_attention"}),
        compiles=True,
        forks=True,
        recordable=True,
    )

    def rank(self, requirements: Requirements) -> int | None:
        """Before `dynamic`, where there are attentions that read its pages at full speed."""
        wanted = requirements.device in ("cpu", "cuda")
        return 20 if wanted and known(requirements, requirements.packed_numbers) else None

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        return replace(super().imply(requirements, options), page_size=options.page_size)

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        measured = options.memory is not None or requirements.device != "cpu"
        if (
            measured
            and options.num_tokens is None
            and not known(requirements, requirements.packed_numbers)
        ):
            reasons.append(
                "does not know before this model runs how much a token takes; say how many fit "
                "with 'paged?num_tokens=…'"
            )
        if requirements.batch_invariant and options.prefix_sharing:
            reasons.append("prefix_sharing=true goes against deterministic=True; drop one of them")
        if "linear_attention" in requirements.layer_types and options.swap:
            reasons.append("swap=true would bring pages back without the states of layers; drop it")
        if requirements.tp_size > 1 and options.swap:
            reasons.append(
                "swap=true goes by the free memory of one process, and tp_size="
                f"{requirements.tp_size} shares the model; drop it"
            )
        return reasons

    def unrecordable(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().unrecordable(requirements, options)
        if options.num_tokens is None and _share(requirements, options) is None:
            reasons.append("its pools grow, and so move (with 'paged?num_tokens=…' they do not)")
        return reasons

    def request_bytes(self, requirements: Requirements, options: Any, tokens: int) -> int | None:
        if not known(requirements, requirements.packed_numbers):
            return None
        size = _page_size(requirements, options)
        numbers = 0
        for count, window in zip(requirements.packed_numbers, requirements.windows, strict=True):
            places = tokens if window is None else min(tokens, window + size - 1)
            numbers += count * -(-places // size) * size
        return numbers * BYTES[requirements.dtype] + (requirements.state_bytes or 0)

    def pool_bytes(self, requirements: Requirements, options: Any) -> int | None:
        if options.num_tokens is None or not known(requirements, requirements.packed_numbers):
            return None
        pages: int = -(-options.num_tokens // _page_size(requirements, options))
        return pages * self._page_bytes(requirements, options)

    def allocated_bytes(
        self, requirements: Requirements, options: Any, tokens: int, requests: int
    ) -> int | None:
        """Pools that grow do so by doubling: those of layers with one window together."""
        grows = requirements.device == "cpu" and options.num_tokens is options.memory is None
        if not grows or not known(requirements, requirements.packed_numbers):
            return super().allocated_bytes(requirements, options, tokens, requests)
        size, total = _page_size(requirements, options), 0
        for count, window in zip(requirements.packed_numbers, requirements.windows, strict=True):
            places = tokens if window is None else min(tokens, window + size - 1)
            pages = max(FIRST_PAGES, requests * -(-places // size))
            doublings = (-(-pages // FIRST_PAGES) - 1).bit_length()
            total += count * (FIRST_PAGES << doublings) * size
        states = requests * (requirements.state_bytes or 0)
        return total * BYTES[requirements.dtype] + states

    def _page_bytes(self, requirements: Requirements, options: Any) -> int:
        """One page in every layer."""
        numbers = sum(requirements.packed_numbers) * BYTES[requirements.dtype]
        return numbers * _page_size(requirements, options)

    def pool_of(self, requirements: Requirements, options: Any, left: int) -> int | None:
        """A share of what is left, in whole pages; None: pools grow, or nobody knows a page."""
        share = _share(requirements, options)
        if share is None or not known(requirements, requirements.packed_numbers):
            return self.pool_bytes(requirements, options)
        page = self._page_bytes(requirements, options)
        return int(share * left) // page * page

    def _num_tokens(self, context: BindContext) -> int | None:
        """How many tokens the pools hold; the weights are loaded by now."""
        needs, options = context.requirements, context.options
        share = _share(needs, options)
        if share is None:
            return options.num_tokens  # type: ignore[no-any-return]
        device = str(context.device)
        page = self._page_bytes(needs, options)
        free = free_bytes(device) if context.free is None else context.free
        if free is None:
            raise CacheFullError("paged: nobody tells how much memory is free; give it num_tokens")
        left = int(context.memory_share * max(0, free - context.step_bytes))
        pages = (self.pool_of(needs, options, left) or 0) // page
        others = _held_by_others(device)
        if not pages:
            raise CacheFullError(
                f"paged: {share:g} of the free memory is less than one page of {in_units(page)}: "
                f"{in_units(free)} are free on {device}, of which steps need "
                f"{in_units(context.step_bytes)}{_beside(others)}; free some, or choose a smaller "
                "page_size"
            )
        told = f"paged takes {in_units(pages * page)} of {in_units(free)} free on {device}"
        logger.log(logging.WARNING if others else logging.INFO, "%s%s", told, _beside(others))
        return pages * _page_size(needs, options)

    def bind(self, context: BindContext) -> KVCache:
        from jackfield_plugins.cache.paged.store import PagedKVCache

        options, device = context.options, context.device
        # By free memory, which processes that share a model would each see otherwise.
        states = "linear_attention" in context.requirements.layer_types
        swap = device.type != "cpu" and context.requirements.tp_size == 1 and not states
        made = PagedKVCache(
            context.requirements.windows,
            _page_size(context.requirements, options),
            self._num_tokens(context),
            device,
            prefix_sharing=(
                not context.requirements.batch_invariant
                if options.prefix_sharing is None
                else options.prefix_sharing
            ),
            forgets=context.requirements.live,  # a live model, which may be trained on
            swap=swap if options.swap is None else options.swap,
            first_pages=FIRST_PAGES,
            spare=context.requirements.compiled,
            longest=context.requirements.context_length,
            chunk=context.max_chunk_size,
        )
        made.allocate(context.requirements.packed_shapes, context.requirements.dtype)
        if _share(context.requirements, options) is not None:
            _measured.add(made)
        return made


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [PagedCache()]
