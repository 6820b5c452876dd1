"""Weights as small integers in groups: how they are found, how they are stored, what they mean.

A group is `group_size` neighbouring inputs of one output. Its weights are integers times one
scale: of 4 bits from -8 to 7, of 8 bits from -128 to 127. There are no zero points: at 4.5 bits a
weight, groups of 32 without one leave an error of 8.1 % on Gaussian weights, groups of 64 with one
8.3 % (on a trained model's 8.2 % and 8.4 %; llama.cpp's Q4_0 8.6 % and 8.7 %).

What is stored, and what a checkpoint holds, is the *canonical form*:

- `qweight`: uint8 `[out_features, in_features * bits / 8]`. Of 8 bits a byte is a weight plus 128;
  of 4 bits it is two, each plus 8, the even input in its lower half.
- `scales`: bfloat16 `[out_features, in_features / group_size]`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from jackfield.errors import ExecutionError

BITS = (4, 8)
#: Of activations, by bits: of 4 the kernels that there are take bfloat16.
DTYPES = {4: (torch.bfloat16,), 8: (torch.bfloat16, torch.float32)}
GROUP_SIZES = (32, 64, 128)
CHUNK = 1 << 18  # weights worked on at a time, so that what is made of them stays in the cache

# Ends of the scale that are tried, as the integer that the largest weight of a group becomes:
# beyond -8 it is clamped, which may serve the others.
ENDS = tuple(-7.0 - 0.4 * step for step in range(8))


class Quantized(NamedTuple):
    """A weight in canonical form."""

    qweight: torch.Tensor
    scales: torch.Tensor


class Product(Protocol):
    """A kernel: a layout of its own for the weights, and the product with them."""

    name: str
    batch_invariant: bool

    def pack(self, quantized: Quantized, bits: int) -> Quantized: ...

    def unpack(self, packed: Quantized, out_features: int, bits: int) -> Quantized: ...

    def linear(
        self,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> torch.Tensor: ...


def name_of(bits: int) -> str:
    """The quantizer whose layers have so many bits."""
    return f"int{bits}-cpu"


def cannot_quantize(weight: torch.Tensor, group_size: int) -> list[str]:
    """Why a weight `[out_features, in_features]` has to stay as it is."""
    reasons = []
    if weight.dim() != 2:
        reasons.append(f"has {weight.dim()} dimensions, not 2")
    elif weight.shape[1] % group_size:
        reasons.append(f"has {weight.shape[1]} inputs, not a multiple of the group's {group_size}")
    if not weight.is_floating_point():
        reasons.append(f"is of {weight.dtype}, not of floating point")
    return reasons


@torch.no_grad()
def quantize(weight: torch.Tensor, *, bits: int = 4, group_size: int = 32) -> Quantized:
    """The canonical form with the least squared error that a search of scales finds.

    `weight` is `[out_features, in_features]` in any floating dtype; beside it and the result,
    little is held. Of 4 bits: for each of `ENDS` the integers are rounded, and the scale that fits
    them best follows by least squares, as in llama.cpp's `make_qx_quants`.
    """
    if reasons := cannot_quantize(weight, group_size):
        raise ExecutionError(f"a weight of {list(weight.shape)} {'; '.join(reasons)}")
    out_features, in_features = weight.shape
    qweight = torch.empty(out_features, in_features * bits // 8, dtype=torch.uint8)
    scales = torch.empty(out_features, in_features // group_size, dtype=torch.bfloat16)
    rows = max(1, CHUNK // in_features)
    for start in range(0, out_features, rows):
        at = slice(start, start + rows)
        groups = weight[at].reshape(-1, group_size).float().T.contiguous()  # [group_size, groups]
        if not groups.isfinite().all():
            raise ExecutionError("a weight that is infinite or not a number cannot be quantized")
        scale = (_fitting_scale(groups) if bits == 4 else groups.abs().amax(0) / 127).bfloat16()
        integers = _rounded(groups, scale.float(), bits).T.reshape(-1, in_features)
        qweight[at] = _stored(integers, bits)
        scales[at] = scale.view(-1, in_features // group_size)
    return Quantized(qweight, scales)


def dequantize(quantized: Quantized, *, bits: int = 4) -> torch.Tensor:
    """The weights that are meant, float32 `[out_features, in_features]`: every kernel's oracle."""
    qweight, scales = quantized
    if bits == 4:
        qweight = torch.stack([qweight & 15, qweight >> 4], -1).flatten(1)
    integers = qweight.float() - (1 << bits - 1)
    groups: torch.Tensor = integers.unflatten(1, (scales.shape[1], -1))
    return (groups * scales.float()[..., None]).flatten(1)


def _fitting_scale(groups: torch.Tensor) -> torch.Tensor:
    """Of `[group_size, groups]`: `[groups]`, signed so that the largest weight becomes negative."""
    largest = groups.gather(0, groups.abs().argmax(0, keepdim=True))[0]
    parts = groups / torch.where(largest == 0, 1.0, largest)  # the largest is 1: nothing overflows
    best, most = torch.full_like(largest, -1 / 8), torch.full_like(largest, -1.0)
    for end in ENDS:
        integers = (parts * end).round_().clamp_(-8, 7)
        # With the best scale for these integers, the squared error is less by this much.
        along, square = (parts * integers).sum(0), integers.square_().sum(0)
        gain = along.square() / square
        better = gain > most  # not where a group is all zero
        best = torch.where(better, along / square, best)
        most = torch.where(better, gain, most)
    return best * largest


def _rounded(groups: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    half = 1 << bits - 1
    vanishes = scale.abs() < torch.finfo(torch.float32).tiny
    inverse: torch.Tensor = torch.where(vanishes, 0.0, 1 / scale)
    return (groups * inverse).round_().clamp_(-half, half - 1)


def _stored(integers: torch.Tensor, bits: int) -> torch.Tensor:
    stored = (integers + (1 << bits - 1)).to(torch.uint8)
    return stored if bits == 8 else stored[:, ::2] | stored[:, 1::2] << 4
