"""``paged``: keys and values in pages, all tokens of a step in one row, nothing padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Cache, CacheCapabilities, KVCache, Requirements

#: What a model needs of its attention -> why pages do not go with it. The attention is told what
#: each sequence holds, not what its mask is: causal, with or without a window.
_NO_PAGES = {
    "own_attention": "needs its own attention",
    "own_mask": "has no place for a mask of the model's own",
    "bidirectional_prefix": "has no place for a prefix that is read in both directions",
}


@dataclass(frozen=True)
class PagedOptions:
    """How the pages are cut, and what becomes of those that nobody holds.

    `page_size` in tokens. `num_tokens`: how many tokens fit at all; None: grows as needed.
    `prefix_sharing`: prompts that begin alike share pages. `swap`: an evicted sequence is copied to
    host memory instead of computed again; None: where the device is not the CPU.
    """

    page_size: int = 32
    num_tokens: int | None = None
    prefix_sharing: bool = True
    swap: bool | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.num_tokens is not None and self.num_tokens < self.page_size:
            raise ValueError(
                f"num_tokens={self.num_tokens} is less than one page of {self.page_size} tokens"
            )


class PagedCache(Cache):
    """After PagedAttention (Kwon et al. 2023, arXiv:2309.06180)."""

    name = "paged"
    options = PagedOptions
    capabilities = CacheCapabilities(
        layout="packed",
        layer_types=frozenset({"full_attention", "sliding_attention"}),
        rollback=frozenset({"full_attention", "sliding_attention"}),
    )

    def rank(self, requirements: Requirements) -> int | None:
        """Before `dynamic` on the CPU; on a GPU it is as fast as its attention, so by name."""
        return 20 if requirements.device == "cpu" else None

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        for feature, problem in _NO_PAGES.items():
            if evidence := requirements.features.get(feature):
                reasons.append(f"{problem} ({evidence})")
        if requirements.irregular:
            reasons.append(
                "stores one layer's keys and values for each call of an attention, and here "
                f"{requirements.irregular}"
            )
        return reasons

    def bind(self, context: BindContext) -> KVCache:
        from jackfield_plugins.cache.paged.store import PagedKVCache

        assert context.model is not None
        options, device = context.options, context.model.device
        return PagedKVCache(
            context.requirements.windows,
            options.page_size,
            options.num_tokens,
            device,
            prefix_sharing=options.prefix_sharing and not context.requirements.batch_invariant,
            swap=device.type != "cpu" if options.swap is None else options.swap,
        )


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [PagedCache()]
