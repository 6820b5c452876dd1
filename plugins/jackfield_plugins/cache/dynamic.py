"""``dynamic``: transformers' `DynamicCache`, which grows with its rows."""

from __future__ import annotations

from jackfield import hookimpl
from jackfield.contracts import BindContext, Cache, CacheCapabilities, KVCache


class DynamicCache(Cache):
    """Keys and values appended column by column; sliding-window layers keep only their window."""

    name = "dynamic"
    auto_rank = 10
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset(
            {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
        ),
    )

    def bind(self, context: BindContext) -> KVCache:
        from transformers import DynamicCache

        from jackfield.padded import PaddedKVCache

        assert context.model is not None
        config = context.config
        return PaddedKVCache(lambda: DynamicCache(config=config), context.model.device)


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [DynamicCache()]
