"""Keys and values on their way into the pools, as a call without Python."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.contracts import NativeCall
from jackfield_plugins.native import NativeKernel

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import PackedLayer

KERNEL = NativeKernel("paged", Path(__file__).parent, instead="compile='none'")
_TOKENS = struct.Struct("@3q").pack  # `struct Call` in kernel.cpp: its beginning
_STATES = struct.Struct("@12q").pack  # and its end
_function: list[int] = []  # the address of `store`, once it is known; 0: there is none


class StoredStates:
    """Keys and values that lie at one place in every step, on their way to the pools of a layer."""

    def __init__(self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._tensors = [weakref.ref(one) for one in (layer.keys, layer.values, keys, values)]
        self._places = layer.keys.shape[0] * layer.keys.shape[1]
        self._states = _described((layer.keys, layer.values), (keys, values))
        self._address = _address() if self._states else 0

    def holds(self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether it is about these very tensors."""
        pool, other, new, newer = self._tensors
        return (
            new() is keys and newer() is values and pool() is layer.keys and other() is layer.values
        )

    def call(self, slots: torch.Tensor) -> NativeCall | None:
        """The call that copies `[tokens, kv_heads, head_dim]` to the `slots`, int64 `[tokens]`.

        None where they are not on the CPU, of another dtype or size than the pools, or strided
        within heads, and on a machine that cannot compile it.
        """
        if not self._address:
            return None
        count = slots.numel()
        return NativeCall(
            self._address, _TOKENS(slots.data_ptr(), count, self._places) + self._states
        )


def _described(pools: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> bytes:
    """Where keys and values lie, and where they go; nothing where they cannot be copied so."""
    found = []
    for pool, one in zip(pools, states, strict=True):
        token, head, dense = one.stride()
        if (
            dense != 1
            or one.dtype is not pool.dtype
            or one.shape[1:] != pool.shape[2:]
            or not (one.is_cpu and pool.is_cpu and pool.is_contiguous())
        ):
            return b""
        size = one.itemsize
        heads, width = one.shape[1:]
        found += [one.data_ptr(), pool.data_ptr(), heads, width * size, token * size, head * size]
    return _STATES(*found)


def _address() -> int:
    if not _function:
        ready = not (KERNEL.cannot_build() or KERNEL.cannot_load())
        made = ctypes.cast(KERNEL.library()["store"], ctypes.c_void_p).value if ready else 0
        _function.append(made or 0)
    return _function[0]
