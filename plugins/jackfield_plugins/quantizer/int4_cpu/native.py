"""The kernel written here (`kernel.cpp`), called with tensors.

A model calls it hundreds of times a token, so little is done in a call: all arguments travel in
one packed struct, and addresses are read anew each time, since a module can be moved or copied.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from jackfield_plugins.native import NativeKernel
from jackfield_plugins.quantizer.int4_cpu import layout
from jackfield_plugins.quantizer.int4_cpu.quantize import BITS, Quantized

KERNEL = NativeKernel("int4-cpu", Path(__file__).parent, instead="the kernel 'torch'")
_PACK = struct.Struct("@10q").pack  # `struct Call` in kernel.cpp
_threads = torch.get_num_threads


class NativeProduct:
    """Products with packed weights. The first on a machine compiles the kernel.

    `batch_invariant`: the bits of a row depend neither on the other rows nor on the threads.
    """

    name = "native"
    batch_invariant = True

    def __init__(self) -> None:
        self._linear: dict[int, Callable[[bytes], None]] = {}
        library = KERNEL.library()
        for bits in BITS:
            function = library[f"linear_{bits}_bits"]
            function.argtypes, function.restype = [ctypes.c_char_p], None
            self._linear[bits] = function

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy loads the kernel of the machine that it is on."""
        return NativeProduct, ()

    def pack(self, quantized: Quantized, bits: int) -> Quantized:
        return layout.pack(quantized, bits)

    def unpack(self, packed: Quantized, out_features: int, bits: int) -> Quantized:
        return layout.unpack(packed, out_features, bits)

    def linear(
        self,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> torch.Tensor:
        """`[..., in_features]` of dense bfloat16 to `[..., out_features]`.

        `sizes` is (in_features, out_features, group_size, bits), which nothing in here checks.
        """
        in_features, out_features, group_size, bits = sizes
        out = hidden.new_empty((*hidden.shape[:-1], out_features))
        self._linear[bits](
            _PACK(
                hidden.data_ptr(), out.data_ptr(), packed[0].data_ptr(), packed[1].data_ptr(),
                0 if bias is None else bias.data_ptr(),
                hidden.numel() // in_features, in_features, out_features, group_size, _threads(),
            )
        )  # fmt: skip
        return out
