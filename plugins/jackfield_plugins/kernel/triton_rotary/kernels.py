"""Rotary position embeddings in Triton: a program has some heads of one token.

Su et al. 2021 (arXiv:2104.09864), the first half of a head against the second, as in GPT-NeoX.

Numerics. Both products and their sum are rounded to the dtype, as most models' own operations do;
some compute in float32 and round once.

With `EARLY` a program begins while the kernel before it still runs, and waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turned(a, b, cos, sin):
    """`a` times `cos`, and `b` times `sin`, added."""
    wide = (a.to(tl.float32) * cos).to(a.dtype).to(tl.float32)
    return (wide + (b.to(tl.float32) * sin).to(a.dtype).to(tl.float32)).to(a.dtype)


@triton.jit
def _rotate(
    states, out, heads, inside, at, c1, c2, s1, s2, head_stride, SIZE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Heads `heads` of a token, which `states` and `out` point at. What is not turned is copied, in
    a block of `REST`.
    """
    mask = inside[:, None] & (at < HALF)[None, :]
    read, write = states + heads[:, None] * head_stride, out + heads[:, None] * SIZE
    first = read + at[None, :]
    a, b = tl.load(first, mask=mask), tl.load(first + HALF, mask=mask)
    tl.store(write + at[None, :], _turned(a, b, c1, -s1), mask=mask)
    tl.store(write + HALF + at[None, :], _turned(b, a, c2, s2), mask=mask)
    if REST > 0:
        behind = 2 * HALF + tl.arange(0, REST)[None, :]
        other = inside[:, None] & (behind < SIZE)
        tl.store(write + behind, tl.load(read + behind, mask=other), mask=other)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, tokens, q_batch, q_token, q_head, k_batch, k_token, k_head,
    angle_batch, angle_token, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`q` and `k` by strides, in numbers; `cos` and `sin` have one set. Outputs are
    `[batch, tokens, heads, SIZE]`, contiguous. Of a head the first 2 × `HALF` are turned.

    Grid (batch × tokens, heads of both by `HEADS`).
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    at = tl.arange(0, BLOCK)
    angles = batch * angle_batch + token * angle_token + at
    real = at < HALF
    c1 = tl.load(cos + angles, mask=real).to(tl.float32)[None, :]
    c2 = tl.load(cos + angles + HALF, mask=real).to(tl.float32)[None, :]
    s1 = tl.load(sin + angles, mask=real).to(tl.float32)[None, :]
    s2 = tl.load(sin + angles + HALF, mask=real).to(tl.float32)[None, :]
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    _rotate(
        q + batch * q_batch + token * q_token, q_out + row * (Q_HEADS * SIZE), heads,
        heads < Q_HEADS, at, c1, c2, s1, s2, q_head, SIZE, HALF, REST,
    )  # fmt: skip
    heads -= Q_HEADS
    _rotate(
        k + batch * k_batch + token * k_token, k_out + row * (K_HEADS * SIZE), heads,
        (heads >= 0) & (heads < K_HEADS), at, c1, c2, s1, s2, k_head, SIZE, HALF, REST,
    )  # fmt: skip
