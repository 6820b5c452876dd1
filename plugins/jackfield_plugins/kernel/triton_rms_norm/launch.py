"""The kernel, called with tensors."""

from __future__ import annotations

import functools

import torch
import triton

from jackfield_plugins.devices import on
from jackfield_plugins.kernel.rms_norm import Meaning
from jackfield_plugins.kernel.triton_rms_norm.kernels import rms_norm_kernel
from jackfield_plugins.launching import (
    Run,
    aligned,
    as_arguments,
    is_aligned,
    is_compiled,
    launch,
    overlapping,
    ready,
)


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, meaning: Meaning) -> torch.Tensor:
    """`[..., size]`, normalized over its last dimension; `weight` is `[size]` of any dtype."""
    size = hidden_states.shape[-1]
    rows = hidden_states.reshape(-1, size).contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if not len(rows):
        return out.view(hidden_states.shape)
    early = _lies(weight)
    run = compiled(rms_norm_kernel, rows.device, rows.dtype, weight.dtype, size, meaning, early)
    weight = weight.contiguous()
    if is_compiled(rms_norm_kernel):
        rows, weight = aligned(rows), aligned(weight)
    given = as_arguments(rms_norm_kernel, rows, weight, out)
    launch(run, rows.device, (len(rows), 1, 1), *given, meaning.epsilon)
    return out.view(hidden_states.shape)


def _lies(weight: torch.Tensor) -> bool:
    """Whether it is read in place: a copy of it is not there yet when a kernel begins early."""
    return weight.is_contiguous() and (not is_compiled(rms_norm_kernel) or is_aligned(weight))


def warm(weight: torch.Tensor, meaning: Meaning) -> None:
    """Compile it now, and in no request; rows mostly have the weight's dtype."""
    if weight.is_cuda:
        where, dtype, early = weight.device, weight.dtype, _lies(weight)
        compiled(rms_norm_kernel, where, dtype, dtype, len(weight), meaning, early)


@functools.cache
def compiled(
    kernel: object,
    device: torch.device,
    dtype: torch.dtype,
    weight: torch.dtype,
    size: int,
    meaning: Meaning,
    early: bool,
) -> Run:
    """`kernel` for rows of `size` numbers on `device`; compiled on the first call.

    `early`: it may begin while the kernel before it still runs.
    """
    block = int(triton.next_power_of_2(size))
    types = {"rows": dtype, "weight": weight, "out": dtype, "epsilon": meaning.epsilon}
    fixed = {
        "SIZE": size, "OFFSET": meaning.offset, "ROUNDS_FIRST": meaning.rounds_first, "BLOCK": block
    }  # fmt: skip
    warps = min(16, max(1, block // 512))
    if early:
        return overlapping(kernel, types, fixed, device, num_warps=warps)
    with on(device):
        return ready(kernel, types, {**fixed, "EARLY": False}, num_warps=warps)
