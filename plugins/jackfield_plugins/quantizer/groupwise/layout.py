"""The native kernel's layout: a permutation of the canonical form, back and forth.

`kernel.cpp` says why: 64 outputs lie side by side, and of each the inputs of one step, 4 bytes. The
last outputs are filled up with zeros.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from jackfield_plugins.quantizer.groupwise.quantize import Quantized

UNIT = 64  # outputs


def pack(quantized: Quantized, bits: int) -> Quantized:
    """`[units, steps, 64 * 4]` bytes and `[units, groups, 64]` scales."""
    steps = _interleaved(quantized.qweight.unflatten(1, (-1, 4)), bits)
    return Quantized(_by_units(steps).flatten(2), _by_units(quantized.scales))


def unpack(packed: Quantized, out_features: int, bits: int) -> Quantized:
    """What `pack` was given, bit by bit."""
    steps = _by_outputs(packed.qweight.unflatten(2, (UNIT, 4)), out_features)
    qweight = _in_order(steps, bits).flatten(1)
    return Quantized(qweight, _by_outputs(packed.scales, out_features))


def _by_units(rows: torch.Tensor) -> torch.Tensor:
    """`[outputs, steps, ...]` as `[units, steps, 64, ...]`."""
    missing = -len(rows) % UNIT
    filled = pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    units: torch.Tensor = filled.unflatten(0, (-1, UNIT))
    return units.transpose(1, 2).contiguous()


def _by_outputs(units: torch.Tensor, out_features: int) -> torch.Tensor:
    return units.transpose(1, 2).flatten(0, 1)[:out_features].contiguous()


def _interleaved(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Even inputs into the lower two of 4 bytes, odd inputs into the higher two."""
    if bits == 8:
        return steps[..., [0, 2, 1, 3]]
    first, second = steps[..., ::2], steps[..., 1::2]
    even = first & 15 | second << 4
    odd = first >> 4 | second & 240
    return torch.cat([even, odd], -1)


def _in_order(steps: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return steps[..., [0, 2, 1, 3]]
    even, odd = steps[..., :2], steps[..., 2:]
    first = even & 15 | odd << 4
    second = even >> 4 | odd & 240
    return torch.stack([first, second], -1).flatten(-2)
