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

from jackfield.contracts import NativeCall
from jackfield.errors import ExecutionError
from jackfield_plugins.native import NativeKernel
from jackfield_plugins.native.arguments import unreadable
from jackfield_plugins.quantizer.int4_cpu import layout
from jackfield_plugins.quantizer.int4_cpu.quantize import BITS, GROUP_SIZES, Quantized

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
        self._addresses: dict[int, int] = {}
        self._bytes: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # by sizes
        library = KERNEL.library()
        for bits in BITS:
            function = library[f"linear_{bits}_bits"]
            function.argtypes, function.restype = [ctypes.c_char_p], None
            self._linear[bits] = function
            self._addresses[bits] = ctypes.cast(function, ctypes.c_void_p).value or 0

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
        """`[..., in_features]` of bfloat16 to `[..., out_features]`.

        `packed` is what `pack` made, `sizes` is (in_features, out_features, group_size, bits).
        Raises ExecutionError where the kernel cannot read them.
        """
        if not hidden.is_contiguous():
            hidden = hidden.contiguous()
        out = hidden.new_empty((*hidden.shape[:-1], sizes[1]))
        arguments = self._arguments(hidden, packed, bias, sizes, out)
        if out.numel():
            self._linear[sizes[3]](arguments)
        return out

    def native(
        self,
        out: torch.Tensor,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> NativeCall | None:
        """The call that writes what `linear` returns into `out`; None for strided tensors."""
        if not (hidden.is_contiguous() and out.is_contiguous() and out.numel()):
            return None
        arguments = self._arguments(hidden, packed, bias, sizes, out)
        return NativeCall(self._addresses[sizes[3]], arguments, (hidden, *packed, bias, out))

    def _arguments(
        self,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
        out: torch.Tensor,
    ) -> bytes:
        """`struct Call` of a product into `out`. Raises ExecutionError."""
        in_features, out_features, group_size, _ = sizes
        qweight, scales = packed
        expected, shape = self._bytes.get(sizes) or self._bytes_of(sizes), hidden.shape
        if not (
            hidden.is_cpu
            and hidden.dtype is torch.bfloat16
            and shape
            and shape[-1] == in_features
            and qweight.is_cpu
            and qweight.dtype is torch.uint8
            and qweight.nbytes == expected[0]
            and qweight.is_contiguous()
            and scales.is_cpu
            and scales.dtype is torch.bfloat16
            and scales.nbytes == expected[1]
            and scales.is_contiguous()
            and (bias is None or _is_bias(bias, out_features))
        ):
            raise _unreadable(hidden, packed, bias, sizes)
        read, weight, scale = hidden.data_ptr(), qweight.data_ptr(), scales.data_ptr()
        if not (read and weight and scale) and out.numel():
            raise _unreadable(hidden, packed, bias, sizes)
        return _PACK(
            read, out.data_ptr(), weight, scale, 0 if bias is None else bias.data_ptr(),
            hidden.numel() // in_features, in_features, out_features, group_size, _threads(),
        )  # fmt: skip

    def _bytes_of(self, sizes: tuple[int, int, int, int]) -> tuple[int, int]:
        """How large packed weights and scales are; sizes that the kernel has not are refused."""
        in_features, out_features, group_size, bits = sizes
        if not (
            in_features > 0
            and out_features > 0
            and bits in BITS
            and group_size in GROUP_SIZES
            and in_features % group_size == 0
        ):
            raise ExecutionError(
                f"int4-cpu has weights of {BITS} bits in groups of {GROUP_SIZES} that divide the "
                f"inputs; here {bits} bits, groups of {group_size}, {in_features} inputs and "
                f"{out_features} outputs"
            )
        weights = -(-out_features // layout.UNIT) * layout.UNIT * in_features
        self._bytes[sizes] = weights * bits // 8, weights // group_size * 2
        return self._bytes[sizes]


def _is_bias(bias: torch.Tensor, out_features: int) -> bool:
    return (
        bias.is_cpu
        and bias.dtype is torch.bfloat16
        and bias.nbytes == 2 * out_features
        and bias.is_contiguous()
        and bias.data_ptr() != 0
    )


def _unreadable(
    hidden: torch.Tensor,
    packed: Quantized,
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int, int],
) -> ExecutionError:
    in_features, out_features, group_size, bits = sizes
    takes = (
        f"bfloat16 [..., {in_features}] on the CPU and, for it and {out_features} outputs, dense "
        f"packed weights of {bits} bits in groups of {group_size} with bfloat16 scales and bias"
    )
    return unreadable(
        "int4-cpu", takes, hidden=hidden, qweight=packed[0], scales=packed[1], bias=bias
    )
