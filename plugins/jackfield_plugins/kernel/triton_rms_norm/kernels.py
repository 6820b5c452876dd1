"""RMSNorm in Triton: a program normalizes one row.

Numerics. Squares are summed in float32, as transformers does for every dtype. `ROUNDS_FIRST` rounds
the normalized row to the input's dtype before it is multiplied by the weight, `OFFSET` is added to
the weight in float32.

With `EARLY` a program begins while the kernel before it still runs: it reads the weight, which
nobody writes, then waits until all before it is done and written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm_kernel(
    rows, weight, out, epsilon, SIZE: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`rows` and `out` are `[count, SIZE]`, contiguous; a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    if EARLY:
        gdc_launch_dependents()
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if EARLY:
        gdc_wait()
    x = tl.load(rows + row * SIZE + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    normalized = wide * scale
    if ROUNDS_FIRST:
        normalized = normalized.to(x.dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (normalized * w).to(x.dtype), mask=inside)
