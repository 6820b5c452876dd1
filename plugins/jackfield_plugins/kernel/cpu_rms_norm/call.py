"""The kernel, called with tensors; all arguments travel in one packed struct."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import nn

from jackfield.errors import ExecutionError
from jackfield_plugins.kernel.cpu_rms_norm.build import KERNEL
from jackfield_plugins.kernel.rms_norm import meaning_of
from jackfield_plugins.native.arguments import unreadable

_PACK = struct.Struct("@5qd3q").pack  # `struct Call` in kernel.cpp
_threads = torch.get_num_threads


def rms_norm_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of an RMSNorm's `forward`: `[..., size]` to the same, its dtype.

    Raises ExecutionError where the kernel cannot read what it is given.
    """
    meaning = meaning_of(module)
    parameters = module._parameters  # attribute access through nn.Module costs more than the call
    dtype = parameters["weight"].dtype  # type: ignore[union-attr]
    function = KERNEL.library()[f"rms_norm_{str(dtype).removeprefix('torch.')}"]
    function.argtypes, function.restype = [ctypes.c_char_p], None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        if hidden_states.dtype is not dtype or weight.dtype is not dtype:
            # A model that mixes dtypes, or was given another one, has its own way.
            return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
        size, shape = weight.numel(), hidden_states.shape
        if not (
            hidden_states.is_cpu
            and weight.is_cpu
            and weight.is_contiguous()
            and shape
            and shape[-1] == size > 0
        ):
            raise _unreadable(hidden_states, weight)
        rows = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
        out = torch.empty_like(rows)
        read, scale = rows.data_ptr(), weight.data_ptr()
        if not (read and scale):
            if out.numel():
                raise _unreadable(hidden_states, weight)
            return out
        function(
            _PACK(
                read, out.data_ptr(), scale, rows.numel() // size, size,
                meaning.epsilon, meaning.offset, meaning.rounds_first, _threads(),
            )
        )  # fmt: skip
        return out

    return forward


def _unreadable(hidden_states: torch.Tensor, weight: torch.Tensor) -> ExecutionError:
    takes = "rows [..., size] and a dense weight [size] on the CPU"
    return unreadable("cpu-rms-norm", takes, hidden_states=hidden_states, weight=weight)
