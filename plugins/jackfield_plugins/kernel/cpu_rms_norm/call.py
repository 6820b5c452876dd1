"""The kernel, called with tensors; all arguments travel in one packed struct."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import nn

from jackfield_plugins.kernel.cpu_rms_norm.build import KERNEL
from jackfield_plugins.kernel.rms_norm import meaning_of

_PACK = struct.Struct("@5qd3q").pack  # `struct Call` in kernel.cpp
_threads = torch.get_num_threads


def rms_norm_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of an RMSNorm's `forward`: `[..., size]` to the same, its dtype."""
    meaning = meaning_of(module)
    parameters = module._parameters  # attribute access through nn.Module costs more than the call
    kind = str(parameters["weight"].dtype).removeprefix("torch.")  # type: ignore[union-attr]
    function = KERNEL.library()[f"rms_norm_{kind}"]
    function.argtypes, function.restype = [ctypes.c_char_p], None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        if hidden_states.dtype is not weight.dtype:  # a model that mixes dtypes has its own way
            return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
        rows = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
        out = torch.empty_like(rows)
        size = weight.shape[0]
        function(
            _PACK(
                rows.data_ptr(), out.data_ptr(), weight.data_ptr(), rows.numel() // size, size,
                meaning.epsilon, meaning.offset, meaning.rounds_first, _threads(),
            )
        )  # fmt: skip
        return out

    return forward
