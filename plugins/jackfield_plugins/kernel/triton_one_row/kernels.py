"""Products of one row in Triton: a program has a few rows of the weight, with all their numbers.

Numerics. Products are summed in float32 and rounded once, as by cuBLAS. In a gated MLP both
products, their SiLU and what they are multiplied to are rounded as the layer's own operations do.

With `EARLY` a program begins while the kernel before it still runs: it reads the first of the
weight, which nobody writes, then waits until all before it is done and written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _read(weight, n, inside, begin, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers `begin` … of the rows `n` of `weight`, `[OUT, BLOCK]`."""
    at = begin + tl.arange(0, BLOCK)
    real = inside[:, None]
    if SIZE % BLOCK != 0:
        real = real & (at < SIZE)[None, :]
    rows = weight + n[:, None] * SIZE + at[None, :]
    return tl.load(rows, mask=real, other=0.0, eviction_policy="evict_first")


@triton.jit
def _given(x, begin, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers `begin` … of the row, in float32, `[1, BLOCK]`."""
    at = begin + tl.arange(0, BLOCK)
    if SIZE % BLOCK == 0:
        found = tl.load(x + at)
    else:
        found = tl.load(x + at, mask=at < SIZE, other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit
def linear_kernel(
    x, weight, other, out, outputs, SIZE: tl.constexpr, OTHER: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`x` `[SIZE]`, `weight` `[outputs, SIZE]`, `out` `[outputs]`, contiguous.

    `other` is the bias, where there is one.
    """
    n = tl.program_id(0).to(tl.int64) * OUT + tl.arange(0, OUT)
    inside = n < outputs
    if EARLY:
        gdc_launch_dependents()
    w = _read(weight, n, inside, 0, SIZE, BLOCK)
    if EARLY:
        gdc_wait()
    sums = _given(x, 0, SIZE, BLOCK) * w.to(tl.float32)
    for begin in range(BLOCK, SIZE, BLOCK):
        w = _read(weight, n, inside, begin, SIZE, BLOCK)
        sums += _given(x, begin, SIZE, BLOCK) * w.to(tl.float32)
    found = tl.sum(sums, 1)
    if OTHER:
        found += tl.load(other + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(
    x, weight, other, out, outputs, SIZE: tl.constexpr, OTHER: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same of two weights: SiLU of the product with `weight`, times that with `other`."""
    n = tl.program_id(0).to(tl.int64) * OUT + tl.arange(0, OUT)
    inside = n < outputs
    if EARLY:
        gdc_launch_dependents()
    w = _read(weight, n, inside, 0, SIZE, BLOCK)
    u = _read(other, n, inside, 0, SIZE, BLOCK)
    if EARLY:
        gdc_wait()
    given = _given(x, 0, SIZE, BLOCK)
    opened, passed = given * w.to(tl.float32), given * u.to(tl.float32)
    for begin in range(BLOCK, SIZE, BLOCK):
        w = _read(weight, n, inside, begin, SIZE, BLOCK)
        u = _read(other, n, inside, begin, SIZE, BLOCK)
        given = _given(x, begin, SIZE, BLOCK)
        opened += given * w.to(tl.float32)
        passed += given * u.to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    gate, up = tl.sum(opened, 1).to(kind), tl.sum(passed, 1).to(kind)
    tl.store(out + n, _times(gate, up), mask=inside)


@triton.jit
def _times(gate, up):
    """SiLU of `gate` times `up`, each rounded as torch's own two operations round."""
    wide = gate.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (opened * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def times_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    """SiLU of `gate` times `up`: what is between the products of a gated MLP, of any rows."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    opened, passed = tl.load(gate + at, mask=inside), tl.load(up + at, mask=inside)
    tl.store(out + at, _times(opened, passed), mask=inside)
