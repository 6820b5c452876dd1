"""RMSNorm in Triton: a program normalizes one row.

Numerics. Squares are summed in float32, as transformers does for every dtype. `ROUNDS_FIRST` rounds
the normalized row to the input's dtype before it is multiplied by the weight, `OFFSET` is added to
the weight in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    rows, weight, out, stride, size, epsilon, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`rows` `[count, size]` with `stride` numbers from row to row, `out` dense; one row each."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(rows + row * stride + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    normalized = wide * scale
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if ROUNDS_FIRST:
        normalized = normalized.to(x.dtype).to(tl.float32)
    tl.store(out + row * size + at, (normalized * w).to(x.dtype), mask=inside)
