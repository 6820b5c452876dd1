"""Compile, while a model is loaded, what its steps will need."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jackfield.contracts import BindContext, Requirements
from jackfield_plugins.attention.triton.launch import PagedAttention
from jackfield_plugins.attention.triton.variants import Shape, dense, interpreted


def compile_ahead(attention: PagedAttention, context: BindContext, page_size: int) -> None:
    """The kernels for all layers of a model; the cache has pages of `page_size` tokens."""
    if interpreted() or context.model is None:
        return
    for shape in shapes(context.requirements, page_size):
        attention.compile(shape, context.device)


def shapes(needs: Requirements, page_size: int) -> Iterator[Shape]:
    """The shapes of a model's layers, by what is known of it.

    None where its heads are of several sizes or numbers: the first step compiles for those.
    """
    sizes, kv_heads = set(needs.head_dims), needs.num_key_value_heads
    if len(sizes) != 1 or set(needs.packed_numbers) != {2 * kv_heads * max(sizes)}:
        return
    (size,) = sizes
    strides = dense(page_size, kv_heads, size)
    for window in dict.fromkeys(needs.windows):
        yield Shape(
            dtype=getattr(torch, needs.dtype),
            heads=needs.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=size,
            value_dim=size,
            page_size=page_size,
            window=window,
            softcap="softcap" in needs.features,
            sinks="sinks" in needs.features,
            key_strides=strides,
            value_strides=strides,
        )
