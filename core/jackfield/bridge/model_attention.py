"""A model's own attention, where a backend leaves it to that: as a backend's function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import sdpa_mask

from jackfield.bridge.model_layers import attention_modules, replaceable
from jackfield.contracts import (
    BoundAttention,
    PackedLayer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_attention(model: PreTrainedModel) -> BoundAttention | None:
    """The eager attention of `model`'s own code as a function pair, where it can be had as one."""
    if not replaceable(model):
        return None
    classes: set[Any] = {type(module) for _, module in attention_modules(model)}
    if not all(map(_eager_of, classes)):
        return None

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = _eager_of(module.__class__)
        return own(module, *args, **kwargs)

    def packed(module: Any, query: torch.Tensor, layer: PackedLayer, **kwargs: Any) -> torch.Tensor:
        rows = []
        for row, span in enumerate(layer.step.spans):
            keys, values = layer.gather(row)
            bias = query.new_zeros(
                1, keys.shape[1]
            )  # some models add a mask without asking for one
            if (seen := layer.mask(row)) is not None:
                bias = bias.expand_as(seen).masked_fill(
                    ~seen, torch.finfo(_narrow(query.dtype)).min
                )
            bias = bias[None, None]
            queries = query[span.query_start : span.query_start + span.query_len].transpose(0, 1)[
                None
            ]
            rows.append(forward(module, queries, keys[None], values[None], bias, **kwargs)[0][0])
        return torch.cat(rows)

    return BoundAttention(forward, narrow_eager_mask, packed)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


@functools.cache
def _eager_of(cls: Any) -> Callable[..., Any] | None:
    """The eager function beside an attention class, or beside the one it derives from."""
    for base in cls.__mro__:
        found = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def narrow_eager_mask(dtype: torch.dtype, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask for eager attention, filled with float32's lowest number in float64.

    Models softmax in float32, where float64's lowest is -inf: a row of padding would become NaN.
    Made here, since transformers up to 5.17 copies a number of the host's for it in each step.
    """
    seen: Any = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})
    if seen is None:  # an encoder's tokens all see one another
        return None
    unseen = torch.finfo(_narrow(dtype)).min
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), unseen)
