"""``static``: transformers' `StaticCache`, allocated once, so that a step can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    Requirements,
    TransformersCache,
)
from jackfield.errors import UsageError

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class StaticOptions:
    """`max_cache_len`: columns, prompt and new tokens together. None: what each batch can need."""

    max_cache_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_cache_len is not None and self.max_cache_len < 1:
            raise ValueError(f"max_cache_len must be at least 1, not {self.max_cache_len}")


class StaticCache(TransformersCache):
    """Keys and values of fixed shape at fixed addresses, also for rows that have finished.

    No rollback: transformers cannot crop it.
    """

    name = "static"
    options = StaticOptions
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset(
            {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
        ),
        static_shapes=True,
        compiles=True,
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if bias := requirements.features.get("position_bias"):
            reasons.append(
                f"the model makes its position bias ({bias}) for the columns written so far, and a "
                "static cache shows it all of them"
            )
        if own := requirements.features.get("own_attention"):
            reasons.append(
                f"the model's own attention ({own}) may take the columns of a static cache that "
                "are not written yet for tokens"
            )
        if requirements.dynamic_only:
            names = ", ".join(requirements.dynamic_only)
            reasons.append(f"transformers keeps {names} layers in no fixed shape")
        return reasons

    def max_cache_len(self, options: Any) -> int | None:
        limit: int | None = options.max_cache_len
        return limit

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        from transformers import StaticCache

        made = StaticCache(
            config=context.config, max_cache_len=self.columns(context.options, length)
        )
        layers: list[Any] = made.layers
        for layer in layers:  # else each is copied there in the first step, and waited for
            if (written := getattr(layer, "cumulative_length", None)) is not None:
                layer.cumulative_length = written.new_zeros((), device=context.device)
        if length is not None:  # else plain transformers code has it, which may compile it
            from jackfield_plugins.cache.static_layers import count_on_host

            count_on_host(made)
        return made

    def columns(self, options: Any, length: int | None) -> int:
        """How many there are to be. Raises UsageError where nobody knows."""
        columns: int | None = options.max_cache_len or length
        if columns is None:
            raise UsageError(
                f"nobody knows how long this batch becomes; write '{self.name}?max_cache_len=…'"
            )
        return columns


@hookimpl
def jackfield_cache() -> list[Cache]:
    return [StaticCache()]
