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
_SLOTS = struct.Struct("@2q")  # `struct Slots` in kernel.cpp
_CALL = struct.Struct("@14q").pack  # `struct Call`
_function: list[int] = []  # the address of `store`, once it is known; 0: there is none


class StepSlots:
    """Where the tokens of a step go, at one place in memory for the calls of all layers."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(_SLOTS.size)
        self._slots: torch.Tensor | None = None

    def put(self, slots: torch.Tensor) -> None:
        """Have the calls take `slots`, int64 `[tokens]`."""
        if slots is not self._slots:
            self._slots = slots
            _SLOTS.pack_into(self.memory, 0, slots.data_ptr(), slots.numel())


class StoredStates:
    """Keys and values that lie at one place in every step, on their way to the pools of a layer."""

    def __init__(
        self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor, step: StepSlots
    ) -> None:
        """The call copies `[tokens, kv_heads, head_dim]` to the slots of `step`.

        There is none where they are not on the CPU, of another dtype or size than the pools, or
        strided within heads, and on a machine that cannot compile it.
        """
        self._tensors = [weakref.ref(one) for one in (layer.keys, layer.values, keys, values)]
        self.call: NativeCall | None = None
        if states := _described((layer.keys, layer.values), (keys, values)):
            places = layer.keys.shape[0] * layer.keys.shape[1]
            arguments = _CALL(ctypes.addressof(step.memory), places, *states)
            if address := _address():
                self.call = NativeCall(address, arguments, (step.memory,))

    def holds(self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether it is about these very tensors."""
        pool, other, new, newer = self._tensors
        return (
            new() is keys and newer() is values and pool() is layer.keys and other() is layer.values
        )


def _described(pools: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> list[int]:
    """Where keys and values lie, and where they go; nothing where they cannot be copied so."""
    found: list[int] = []
    for pool, one in zip(pools, states, strict=True):
        token, head, dense = one.stride()
        if (
            dense != 1
            or one.dtype is not pool.dtype
            or one.shape[1:] != pool.shape[2:]
            or not (one.is_cpu and pool.is_cpu and pool.is_contiguous())
        ):
            return []
        size = one.itemsize
        heads, width = one.shape[1:]
        found += [one.data_ptr(), pool.data_ptr(), heads, width * size, token * size, head * size]
    return found


def _address() -> int:
    if not _function:
        ready = not KERNEL.cannot_load()
        made = ctypes.cast(KERNEL.library()["store"], ctypes.c_void_p).value if ready else 0
        _function.append(made or 0)
    return _function[0]
