"""Attention in Triton, one pass over the keys (Dao et al. 2022, arXiv:2205.14135).

Numerics: products and sums are of float32. A running maximum keeps exponentials at most 1; what was
summed up under an older maximum is scaled down to the new one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jackfield.errors import ExecutionError

BLOCK = 32  # queries and keys of a tile


@triton.jit
def attention_kernel(
    query, key, value, mask, out, scaling, softcap, queries, keys,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program for BLOCK_M queries of one head of one row; all tensors are contiguous."""
    head, row = tl.program_id(1) % HEADS, (tl.program_id(1) // HEADS).to(tl.int64)
    m, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    asked = (m[:, None] < queries) & (d[None, :] < HEAD_DIM)
    place = ((row * HEADS + head) * queries + m[:, None]) * HEAD_DIM + d[None, :]
    q = tl.load(query + place, mask=asked, other=0.0).to(tl.float32)
    first = (row * (HEADS // GROUP) + head // GROUP) * keys  # of the keys that the group shares
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, keys, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = (n[:, None] < keys) & (d[None, :] < HEAD_DIM)
        at = (first + n[:, None]) * HEAD_DIM + d[None, :]
        k = tl.load(key + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(value + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:  # tanh(x) is 2 · sigmoid(2x) - 1
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        if MASKED:
            both = (m[:, None] < queries) & (n[None, :] < keys)
            seen = tl.load(mask + (row * queries + m[:, None]) * keys + n[None, :], both, other=0)
            scores = tl.where(seen != 0, scores, -3.0e38)  # finite: no NaN in rows of padding
        scores = tl.where(n[None, :] < keys, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        shares, kept = tl.exp(scores - new[:, None]), tl.exp(largest - new)
        total = total * kept + tl.sum(shares, 1)
        output = output * kept[:, None] + tl.dot(shares, v, input_precision="ieee")
        largest = new
    place = ((row * queries + m[:, None]) * HEADS + head) * HEAD_DIM + d[None, :]
    tl.store(out + place, (output / total[:, None]).to(out.dtype.element_ty), mask=asked)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `reference.attend`, without gradients."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise ExecutionError("this kernel computes no gradients; run under torch.no_grad()")
    rows, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    out = query.new_empty(rows, queries, heads, head_dim)
    if mask is not None:
        mask = mask.expand(rows, 1, queries, keys).to(torch.int8).contiguous()
    # Strided inputs are copied here. A kernel that is to be fast is told their strides instead.
    query, key, value = (t.contiguous() for t in (query, key, value))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attention_kernel[triton.cdiv(queries, BLOCK), rows * heads](
            query, key, value, query if mask is None else mask, out, scaling, softcap or 1.0,
            queries, keys, HEADS=heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim,
            MASKED=mask is not None, CAPPED=softcap is not None,
            BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
    return out
