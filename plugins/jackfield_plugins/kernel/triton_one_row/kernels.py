"""Products of one row in Triton: a program has a few rows of the weight, with all their numbers.

Numerics. Products are summed in float32 and rounded once, as by cuBLAS. In a gated MLP both
products, their SiLU and what they are multiplied to are rounded as the layer's own operations do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums(x, weight, n, inside, SIZE: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """float32 `[OUT]`: `x` `[SIZE]` times the rows `n` of `weight`."""
    sums = tl.zeros((OUT, BLOCK), tl.float32)
    for begin in range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        rows = weight + n[:, None] * SIZE + at[None, :]
        real = inside[:, None]
        if SIZE % BLOCK == 0:
            given = tl.load(x + at)
        else:
            given = tl.load(x + at, mask=at < SIZE, other=0.0)
            real = real & (at < SIZE)[None, :]
        w = tl.load(rows, mask=real, other=0.0, eviction_policy="evict_first")
        sums += given.to(tl.float32)[None, :] * w.to(tl.float32)
    return tl.sum(sums, 1)


@triton.jit
def linear_kernel(
    x, weight, other, out, outputs, SIZE: tl.constexpr, OTHER: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`x` `[SIZE]`, `weight` `[outputs, SIZE]`, `out` `[outputs]`, contiguous.

    `other` is the bias, where there is one.
    """
    n = tl.program_id(0).to(tl.int64) * OUT + tl.arange(0, OUT)
    inside = n < outputs
    sums = _sums(x, weight, n, inside, SIZE, OUT, BLOCK)
    if OTHER:
        sums += tl.load(other + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(
    x, weight, other, out, outputs, SIZE: tl.constexpr, OTHER: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of two weights: SiLU of the product with `weight`, times that with `other`."""
    n = tl.program_id(0).to(tl.int64) * OUT + tl.arange(0, OUT)
    inside = n < outputs
    kind: tl.constexpr = out.dtype.element_ty
    opened = _sums(x, weight, n, inside, SIZE, OUT, BLOCK).to(kind).to(tl.float32)
    passed = _sums(x, other, n, inside, SIZE, OUT, BLOCK).to(kind).to(tl.float32)
    opened = (opened / (1 + tl.exp(-opened))).to(kind).to(tl.float32)
    tl.store(out + n, (opened * passed).to(kind), mask=inside)
