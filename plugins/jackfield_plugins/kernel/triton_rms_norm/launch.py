"""The kernel, called with tensors."""

from __future__ import annotations

import torch
import triton

from jackfield_plugins.devices import on
from jackfield_plugins.kernel.rms_norm import Meaning
from jackfield_plugins.kernel.triton_rms_norm.kernels import rms_norm_kernel


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, meaning: Meaning) -> torch.Tensor:
    """`[..., size]`, normalized over its last dimension; `weight` is `[size]` of any dtype."""
    size = hidden_states.shape[-1]
    rows = hidden_states.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    block = triton.next_power_of_2(size)
    if len(rows):
        with on(rows.device):  # Triton launches on the current device
            rms_norm_kernel[(len(rows),)](
                rows, weight, out, rows.stride(0), size, meaning.epsilon,
                OFFSET=meaning.offset, ROUNDS_FIRST=meaning.rounds_first, BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip
    return out.view(hidden_states.shape)
