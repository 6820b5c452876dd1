"""``paged``: keys and values in pages, all tokens of a step in one row, nothing padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Cache, CacheCapabilities, KVCache, Requirements
from jackfield.errors import PlanError


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

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if "own_attention" in requirements.features:
            reasons.append(f"needs its own attention ({requirements.features['own_attention']})")
        return reasons

    def bind(self, context: BindContext) -> KVCache:
        from jackfield_plugins.cache.paged.store import PagedKVCache

        assert context.model is not None
        cached = len(context.requirements.windows)
        layers = context.config.get_text_config(decoder=True).num_hidden_layers
        if layers > cached:
            raise PlanError(
                f"paged: {context.requirements.architecture} has {layers} layers and caches keys "
                f"and values for {cached}; the others share theirs (num_kv_shared_layers), which "
                "this cache cannot do; select 'dynamic'"
            )
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
