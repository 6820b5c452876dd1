"""Rows that join others in transformers' cache of an encoder-decoder model, and rows that leave.

A decoder's own keys and values are aligned at the right: who has fewer columns gets empty ones at
the left. Those of what an encoder said are aligned at the left. Empty columns are zeros, and a
step's masks hide them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def can_join(cache: Cache) -> bool:
    """Whether rows of `cache`, that of a decoder's own tokens, are tensors of its columns alone.

    Layers of other classes keep codes, a state, or are elsewhere.
    """
    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1)
        for layer in cache.layers
    )


def join(cache: EncoderDecoderCache, other: EncoderDecoderCache) -> None:
    """Put the rows of `other` behind those of `cache`, which is changed; both have read tokens."""
    columns = max(cache.get_seq_length(), other.get_seq_length())
    caches = cache.self_attention_cache, other.self_attention_cache
    for own, new in zip(*map(_holding, caches), strict=True):
        kept = _kept(own, columns)
        _set(own, lambda a, b, kept=kept: torch.cat([_left(a, kept), _left(b, kept)]), new)
        _count(own, columns)
    caches = cache.cross_attention_cache, other.cross_attention_cache
    for own, new in zip(*map(_holding, caches), strict=True):
        kept = max(own.keys.shape[-2], new.keys.shape[-2])
        _set(own, lambda a, b, kept=kept: torch.cat([_right(a, kept), _right(b, kept)]), new)


def take(cache: EncoderDecoderCache, rows: torch.Tensor, columns: int) -> None:
    """The rows become those with these numbers, of which the last `columns` columns are kept.

    A row may be taken several times. Changes `cache`.

    Args:
        cache: One that has read tokens, `columns` of them or more.
        rows: int64 `[new rows]`, on the cache's device.
        columns: What lies before them, nobody has a token in.
    """
    for layer in _holding(cache.self_attention_cache):
        kept = _kept(layer, columns)
        _set(layer, lambda a, kept=kept: _left(a, kept).index_select(0, rows.to(a.device)))
        _count(layer, columns)
    for layer in _holding(cache.cross_attention_cache):
        _set(layer, lambda a: a.index_select(0, rows.to(a.device)))


def crop_encoder(cache: object, columns: int) -> None:
    """Keep the first `columns` of what an encoder said, where `cache` has more: no row has."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    for layer in _holding(cache.cross_attention_cache):
        if layer.keys.shape[-2] > columns:
            _set(layer, lambda a: a[:, :, :columns].clone())


def _holding(cache: Cache) -> list[Any]:
    """Its layers that hold something: not yet before the first step, and some models' never do."""
    layers: list[Any] = cache.layers
    return [layer for layer in layers if layer.is_initialized]


def _set(layer: Any, made: Callable[..., torch.Tensor], *others: Any) -> None:
    layer.keys = made(layer.keys, *(other.keys for other in others))
    layer.values = made(layer.values, *(other.values for other in others))


def _kept(layer: Any, columns: int) -> int:
    """How many of `columns` a layer keeps: one with a window has no more than the next sees."""
    return min(columns, layer.sliding_window - 1) if layer.is_sliding else columns


def _count(layer: Any, columns: int) -> None:
    """A layer with a window counts columns by itself."""
    if layer.is_sliding:
        layer.cumulative_length = columns


def _left(states: torch.Tensor, columns: int) -> torch.Tensor:
    """`states`, `[rows, heads, any, size]`, with so many columns, the last ones."""
    gap = columns - states.shape[-2]
    return pad(states, (0, 0, gap, 0)) if gap > 0 else states[:, :, -gap:]


def _right(states: torch.Tensor, columns: int) -> torch.Tensor:
    """The same, with no fewer columns than there are, those at the left."""
    gap = columns - states.shape[-2]
    return pad(states, (0, 0, 0, gap)) if gap else states
