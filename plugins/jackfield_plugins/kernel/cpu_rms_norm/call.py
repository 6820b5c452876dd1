"""The kernel, called with tensors; all arguments travel in one packed struct."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jackfield.contracts import NativeCall
from jackfield.errors import ExecutionError
from jackfield_plugins.kernel.cpu_rms_norm.build import KERNEL
from jackfield_plugins.kernel.rms_norm import meaning_of
from jackfield_plugins.native.arguments import unreadable

_PACK = struct.Struct("@5qd3q").pack  # `struct Call` in kernel.cpp
_NAMES = {torch.float32: "rms_norm_float32", torch.bfloat16: "rms_norm_bfloat16"}
_threads = torch.get_num_threads
_function = functools.cache(KERNEL.function)


def rms_norm_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of an RMSNorm's `forward`: `[..., size]` to the same, its dtype.

    Raises ExecutionError where the kernel cannot read what it is given.
    """
    from jackfield_plugins.kernel.cpu_rms_norm import operator

    meaning = meaning_of(module)
    means = meaning.epsilon, meaning.offset, meaning.rounds_first
    parameters = module._parameters  # attribute access through nn.Module costs more than the call
    dtype = parameters["weight"].dtype  # type: ignore[union-attr]

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        if hidden_states.dtype is not dtype or weight.dtype is not dtype:
            # A model that mixes dtypes, or was given another one, has its own way.
            return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
        if torch.compiler.is_compiling():
            return operator.rms_norm(hidden_states, weight, *means)  # type: ignore[no-any-return]
        return rms_norm(hidden_states, weight, *means)

    return forward


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: int, rounds_first: bool
) -> torch.Tensor:
    """The norm of `[..., size]`, of bfloat16 or float32 as `weight` is, dense.

    Raises ExecutionError where the kernel cannot read them.
    """
    dense = rows if rows.is_contiguous() else rows.contiguous()
    out = torch.empty_like(dense)
    arguments = _arguments(out, dense, weight, epsilon, offset, rounds_first)
    if out.numel() and not _function(_NAMES[rows.dtype])(arguments):
        raise ExecutionError("cpu-rms-norm: the kernel has no such norm")
    return out


def native_rms_norm(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *means: Any
) -> NativeCall | None:
    """The call that writes what `rms_norm` returns into `out`; None for strided tensors."""
    if not (rows.is_contiguous() and out.is_contiguous() and out.numel()):
        return None
    arguments = _arguments(out, rows, weight, *means)
    return NativeCall(KERNEL.address(_NAMES[rows.dtype]), arguments, (rows, weight, out))


def _arguments(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *means: Any) -> bytes:
    """`struct Call` of a norm into `out`. Raises ExecutionError."""
    size, shape = weight.numel(), rows.shape
    if not (
        rows.is_cpu
        and rows.dtype in _NAMES
        and weight.is_cpu
        and weight.dtype is rows.dtype
        and weight.is_contiguous()
        and shape
        and shape[-1] == size > 0
    ):
        raise _unreadable(rows, weight)
    read, scale = rows.data_ptr(), weight.data_ptr()
    if out.numel() and not (read and scale):
        raise _unreadable(rows, weight)
    return _PACK(
        read, out.data_ptr(), scale, rows.numel() // size, size, *means, _threads(),
    )  # fmt: skip


def _unreadable(hidden_states: torch.Tensor, weight: torch.Tensor) -> ExecutionError:
    takes = "rows [..., size] and a dense weight [size] on the CPU"
    return unreadable("cpu-rms-norm", takes, hidden_states=hidden_states, weight=weight)
