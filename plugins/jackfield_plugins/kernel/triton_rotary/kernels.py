"""Rotary position embeddings in Triton: a program has some heads of one token.

Su et al. 2021 (arXiv:2104.09864), the first half of a head against the second, as in GPT-NeoX.

Numerics. Both products and their sum are rounded to the dtype, as the model's own operations do.

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
    states, out, heads, inside, at, c1, c2, s1, s2, head_stride, HALF: tl.constexpr,
):  # fmt: skip
    """Heads `heads` of a token, which `states` and `out` point at."""
    mask = inside[:, None] & (at < HALF)[None, :]
    read = states + heads[:, None] * head_stride + at[None, :]
    a, b = tl.load(read, mask=mask), tl.load(read + HALF, mask=mask)
    write = out + heads[:, None] * (2 * HALF) + at[None, :]
    tl.store(write, _turned(a, b, c1, -s1), mask=mask)
    tl.store(write + HALF, _turned(b, a, c2, s2), mask=mask)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, tokens, q_batch, q_token, q_head, k_batch, k_token, k_head,
    angle_batch, angle_token, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`q` and `k` by strides, in numbers; `cos` and `sin` have one set. Outputs are
    `[batch, tokens, heads, 2 × HALF]`, contiguous.

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
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    _rotate(
        q + batch * q_batch + token * q_token, q_out + row * (Q_HEADS * 2 * HALF), heads,
        heads < Q_HEADS, at, c1, c2, s1, s2, q_head, HALF,
    )  # fmt: skip
    heads -= Q_HEADS
    _rotate(
        k + batch * k_batch + token * k_token, k_out + row * (K_HEADS * 2 * HALF), heads,
        (heads >= 0) & (heads < K_HEADS), at, c1, c2, s1, s2, k_head, HALF,
    )  # fmt: skip
