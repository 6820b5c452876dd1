"""The kernel, called with tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import nn

from jackfield.contracts import rotary_of
from jackfield_plugins.kernel.triton_rotary.kernels import rotary_kernel
from jackfield_plugins.launching import Run, as_arguments, is_aligned, launch, overlapping

Pair = tuple[torch.Tensor, torch.Tensor]

_HEADS = 8  # of a program
_ALIGNED = 16  # what strides are multiples of, in numbers
_STRIDE = 1 << 40  # such a one; it has 64 bits


def rotary(module: nn.Module) -> Callable[..., Pair]:
    """In the place of the function by which `module`, an attention layer, rotates."""
    own: Any = rotary_of(module)

    def turn(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *args: Any, **kw: Any) -> Pair:
        if args or kw or not fits(q, k, cos, sin):
            found: Pair = own(q, k, cos, sin, *args, **kw)
            return found
        return rotated(q, k, cos, sin)

    return turn


def fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether all lies as the kernel reads it."""
    if not q.dim() == k.dim() == 4:
        return False
    batch, _, tokens, size = q.shape
    tensors = (q, k, cos, sin)
    return (
        cos.shape == sin.shape
        and cos.dim() == 3
        and len(cos) in (1, batch)
        and cos.shape[1] == tokens
        and 0 < cos.shape[2] <= size
        and k.shape[0] == batch
        and k.shape[2:] == q.shape[2:]
        and cos.shape[2] % 2 == 0
        and cos.stride() == sin.stride()
        and {(t.dtype, t.device) for t in tensors} == {(q.dtype, q.device)}
        and all(t.stride(-1) == 1 and is_aligned(t) for t in tensors)
        and all(s % _ALIGNED == 0 for t in tensors for s in t.stride()[:-1])
    )


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """`q` `[batch, heads, tokens, size]` and `k`, turned by `cos` and `sin`.

    `cos` and `sin` are `[batch or 1, tokens, turned]`, of the first numbers of a head. What is
    returned lies as `[batch, tokens, heads, size]`.
    """
    batch, heads, tokens, size = q.shape
    outs = [t.new_empty(batch, tokens, t.shape[1], size) for t in (q, k)]
    if q.numel():
        run = compiled(q.device, q.dtype, heads, k.shape[1], size, cos.shape[2])
        given = as_arguments(rotary_kernel, q, k, cos, sin, *outs)
        strides = [t.stride(dim) for t in (q, k) for dim in (0, 2, 1)]
        grid = (batch * tokens, triton.cdiv(heads + k.shape[1], _HEADS), 1)
        each = cos.stride(0) if len(cos) == batch else 0  # or texts share the angles of one
        launch(run, q.device, grid, *given, tokens, *strides, each, cos.stride(1))
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


@functools.cache
def compiled(
    device: torch.device, dtype: torch.dtype, q_heads: int, k_heads: int, size: int, turned: int
) -> Run:
    """The kernel for heads of `size` numbers, the first `turned` of which are."""
    types: dict[str, Any] = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), dtype)
    types["tokens"] = 17
    strides = ("q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head")
    types |= dict.fromkeys((*strides, "angle_batch", "angle_token"), _STRIDE)
    block, rest = (int(triton.next_power_of_2(n)) if n else 0 for n in (turned // 2, size - turned))
    fixed = {
        "Q_HEADS": q_heads, "K_HEADS": k_heads, "SIZE": size, "HALF": turned // 2, "REST": rest,
        "HEADS": _HEADS, "BLOCK": block,
    }  # fmt: skip
    # Fused, a product and a sum would be rounded once, and the model rounds twice.
    return overlapping(rotary_kernel, types, fixed, device, num_warps=2, enable_fp_fusion=False)
