"""``dynamic``: transformers' `DynamicCache`, which grows with its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    Requirements,
    TransformersCache,
)

if TYPE_CHECKING:
    import transformers


class DynamicCache(TransformersCache):
    """Keys and values appended column by column; sliding-window layers keep only their window.

    Rejected drafts leave holes in the rows of a batch, which are masked out. That is right where a
    layer sees all columns. A window counted in columns would lose live tokens to holes, a linear
    layer has nothing to take back, and a bias on the distance between columns would count them.
    """

    name = "dynamic"
    auto_rank: ClassVar[int | None] = 10
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset(
            {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
        ),
        rollback=frozenset({"full_attention"}),
        compiles=True,
        forks=True,
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.rollback and (bias := requirements.features.get("position_bias")):
            reasons.append(f"cannot take back tokens (rollback) under a position bias ({bias})")
        return reasons

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        from transformers import DynamicCache

        return DynamicCache(config=context.config)


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [DynamicCache()]
