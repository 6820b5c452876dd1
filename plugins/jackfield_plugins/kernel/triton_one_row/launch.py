"""The kernels, called with tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import nn

from jackfield_plugins.devices import on
from jackfield_plugins.kernel.triton_one_row.kernels import (
    gated_kernel,
    linear_kernel,
    times_kernel,
)
from jackfield_plugins.launching import (
    Run,
    aligned,
    as_arguments,
    is_aligned,
    launch,
    overlapping,
    ready,
)

_LARGEST = 2048  # numbers of the weight that a program reads at once
_TIMES = 1024  # numbers of a program that multiplies what is between an MLP's products
_VECTOR = 16  # counts that are multiples of it are known to Triton as such
_MANY = 1 << 40  # such a count; it has 64 bits

Forward = Callable[[torch.Tensor], torch.Tensor]


def linear(module: nn.Linear) -> Forward:
    """What `module` computes, `[..., in]` to `[..., out]`."""
    warm(linear_kernel, module.weight, other=_bias_of(module) is not None)

    def forward(states: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, _bias_of(module)
        if not fits(states, weight) or (bias is not None and not is_aligned(bias)):
            return nn.functional.linear(states, weight, bias)
        return product(linear_kernel, states, weight, bias)

    return forward


def gated(module: Any) -> Forward:
    """What `module`, a gated MLP, computes, `[..., in]` to `[..., in]`."""
    warm(gated_kernel, module.gate_proj.weight, other=True)
    if module.gate_proj.weight.is_cuda:
        weight = module.gate_proj.weight
        compiled_times(weight.device, weight.dtype, len(weight) % _VECTOR == 0)

    def forward(states: torch.Tensor) -> torch.Tensor:
        gate, up = module.gate_proj.weight, module.up_proj.weight
        if fits(states, gate) and fits(states, up):
            inner = product(gated_kernel, states, gate, up)
        else:
            inner = times(module.gate_proj(states), module.up_proj(states))
        found: torch.Tensor = module.down_proj(inner)
        return found

    return forward


def times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of `gate` times `up`, of one shape, rounded as torch's two operations do."""
    gate, up = aligned(gate.contiguous()), aligned(up.contiguous())
    out = torch.empty_like(gate)
    if gate.numel():
        run = compiled_times(gate.device, gate.dtype, gate.shape[-1] % _VECTOR == 0)
        given = as_arguments(times_kernel, gate, up, out)
        grid = (-(-gate.numel() // _TIMES), 1, 1)
        launch(run, gate.device, grid, *given, gate.numel())
    return out


@functools.cache
def compiled_times(device: torch.device, dtype: torch.dtype, whole: bool) -> Run:
    """`whole`: the last vector is full, so that all are loaded as such."""
    types: dict[str, Any] = dict.fromkeys(("gate", "up", "out"), dtype)
    types["count"] = _MANY if whole else _MANY + 1
    with on(device):
        return ready(times_kernel, types, {"BLOCK": _TIMES}, num_warps=4)


def fits(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it is one row, and all lies as the kernels read it."""
    return (
        states.numel() == states.shape[-1] == weight.shape[1]
        and states.dtype == weight.dtype
        and states.device == weight.device
        and weight.is_contiguous()
        and is_aligned(weight)
    )


def _bias_of(module: nn.Linear) -> torch.Tensor | None:
    return module.bias


def product(
    kernel: Any, states: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None
) -> torch.Tensor:
    """`[..., out]`, of `states` `[..., in]`, `weight` `[out, in]` and `other`, a bias or `up`."""
    outputs, size = weight.shape
    row = aligned(states.reshape(size).contiguous())
    out = torch.empty(outputs, dtype=row.dtype, device=row.device)
    run, each = compiled(kernel, row.device, row.dtype, size, outputs, other is not None)
    given = as_arguments(kernel, row, weight, weight if other is None else other, out)
    launch(run, row.device, (-(-outputs // each), 1, 1), *given, outputs)
    return out.view(*states.shape[:-1], outputs)


def warm(kernel: Any, weight: torch.Tensor, *, other: bool) -> None:
    """Compile it now, and in no request."""
    if weight.is_cuda:
        outputs, size = weight.shape
        compiled(kernel, weight.device, weight.dtype, size, outputs, other)


@functools.cache
def compiled(
    kernel: Any, device: torch.device, dtype: torch.dtype, size: int, outputs: int, other: bool
) -> tuple[Run, int]:
    """`kernel` for a row of `size` numbers, and how many outputs a program has.

    Found by measuring on an NVIDIA H200: one row of the weight for a program, two where rows are
    short.
    """
    block = min(_LARGEST, int(triton.next_power_of_2(size)))
    each = 1 if block == _LARGEST else 2
    block = min(block, _LARGEST // each)
    types: dict[str, Any] = dict.fromkeys(("x", "weight", "other", "out"), dtype)
    types["outputs"] = outputs
    fixed = {"SIZE": size, "OTHER": other, "OUT": each, "BLOCK": block}
    return overlapping(kernel, types, fixed, device, num_warps=4), each
