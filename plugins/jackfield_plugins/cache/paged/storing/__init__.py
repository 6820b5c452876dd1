"""Keys and values on their way into the pools, as a call without Python."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.contracts import NativeCall
from jackfield_plugins.native import NativeKernel

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import PackedLayer

KERNEL = NativeKernel("paged", Path(__file__).parent, instead="compile='none'")
_PACK = struct.Struct("@15q").pack  # `struct Call` in kernel.cpp
_function: list[int] = []  # the address of `store`, once it is known; 0: there is none


def stored(
    layer: PackedLayer, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> NativeCall | None:
    """The call that copies `[tokens, kv_heads, head_dim]` to the `slots` of a layer's pools.

    None where they are not on the CPU, of another dtype or size than the pools, or strided within
    heads, and on a machine that cannot compile it.
    """
    pools = layer.keys, layer.values
    states = []
    for pool, one in zip(pools, (keys, values), strict=True):
        token, head, dense = one.stride()
        if (
            dense != 1
            or one.dtype is not pool.dtype
            or one.shape[1:] != pool.shape[2:]
            or not (one.is_cpu and pool.is_cpu and pool.is_contiguous())
        ):
            return None
        size = one.itemsize
        heads, width = one.shape[1:]
        states += [one.data_ptr(), pool.data_ptr(), heads, width * size, token * size, head * size]
    if not (function := _address()):
        return None
    places = pools[0].shape[0] * pools[0].shape[1]
    return NativeCall(function, _PACK(slots.data_ptr(), len(slots), places, *states))


def _address() -> int:
    if not _function:
        ready = not (KERNEL.cannot_build() or KERNEL.cannot_load())
        made = ctypes.cast(KERNEL.library()["store"], ctypes.c_void_p).value if ready else 0
        _function.append(made or 0)
    return _function[0]
