"""Keys and values of a step into their pages, in Triton: a program has one token.

With `EARLY` a program begins while the kernel before it still runs, and waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _copy(states, pool, token, slot, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found = tl.load(states + token * stride + at, mask=at < SIZE)
        tl.store(pool + slot * SIZE + at, found, mask=at < SIZE)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    keys, values, key_pool, value_pool, slots, key_stride, value_stride, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`KEYS` and `VALUES` numbers a token, tokens so many apart, to `slots`, int64 `[tokens]`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    _copy(keys, key_pool, token, slot, key_stride, KEYS, BLOCK)
    _copy(values, value_pool, token, slot, value_stride, VALUES, BLOCK)
