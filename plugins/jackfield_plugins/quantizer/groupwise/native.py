"""The kernel written here (`kernel.cpp`), called with tensors.

A model calls it hundreds of times a token, so little is done in a call: all arguments travel in
one packed struct, and addresses are read anew each time, since a module can be moved or copied.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import ClassVar, Self

import torch

from jackfield.contracts import NativeCall
from jackfield.errors import ExecutionError
from jackfield_plugins.native import NativeKernel
from jackfield_plugins.native.arguments import is_bias, listed, unreadable
from jackfield_plugins.quantizer.groupwise import layout
from jackfield_plugins.quantizer.groupwise.quantize import (
    BITS,
    DTYPES,
    GROUP_SIZES,
    Quantized,
    name_of,
)

KERNEL = NativeKernel(
    "groupwise", Path(__file__).parent, instead="quantization='int4-cpu?kernel=torch'"
)
#: Products with activations that are rounded to 8 bits; compiled where they are asked for.
INT8_KERNEL = NativeKernel(
    "groupwise-int8", Path(__file__).parent / "int8", instead="activations=dtype"
)
_PACK = struct.Struct("@12q").pack  # `struct Call` in groups.h
_threads = torch.get_num_threads


class NativeProduct:
    """Products with packed weights. The first on a machine compiles the kernel.

    `batch_invariant`: the bits of a row depend neither on the other rows nor on the threads.
    """

    name = "native"
    batch_invariant = True
    kernel: ClassVar[NativeKernel] = KERNEL
    functions = ("groupwise_linear", "groupwise_linears")  # of one product, and of several

    def __init__(self) -> None:
        one, several = self.functions
        self._linear = self.kernel.function(one)
        self._address = self.kernel.address(one)
        self._several = self.kernel.address(several)
        self._bytes: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # by sizes

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """A copy loads the kernel of the machine that it is on."""
        return type(self), ()

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
        """`[..., in_features]` of bfloat16, or of 8 bits float32, to `[..., out_features]`.

        `packed` is what `pack` made, `sizes` is (in_features, out_features, group_size, bits).
        Raises ExecutionError where the kernel cannot read them.
        """
        if not hidden.is_contiguous():
            hidden = hidden.contiguous()
        out = hidden.new_empty((*hidden.shape[:-1], sizes[1]))
        arguments = self._arguments(hidden, packed, bias, sizes, out)
        if out.numel() and not self._linear(arguments):
            raise ExecutionError(f"the kernel of {sizes[3]}-bit weights has no such product")
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
        keeps = (hidden, *packed, bias, out)
        return NativeCall(self._address, arguments, keeps, self._several, by_row=True)

    def _arguments(
        self,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
        out: torch.Tensor,
    ) -> bytes:
        """`struct Call` of a product into `out`. Raises ExecutionError."""
        in_features, out_features, group_size, bits = sizes
        qweight, scales = packed
        expected, shape = self._bytes.get(sizes) or self._bytes_of(sizes), hidden.shape
        dtype = hidden.dtype
        if not (
            hidden.is_cpu
            and dtype in DTYPES[bits]
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
            and (bias is None or is_bias(bias, out_features, dtype))
        ):
            raise _unreadable(hidden, packed, bias, sizes)
        read, weight, scale = hidden.data_ptr(), qweight.data_ptr(), scales.data_ptr()
        if not (read and weight and scale) and out.numel():
            raise _unreadable(hidden, packed, bias, sizes)
        return _PACK(
            read, out.data_ptr(), weight, scale, 0 if bias is None else bias.data_ptr(),
            hidden.numel() // in_features, in_features, out_features, group_size, bits,
            dtype is torch.float32, _threads(),
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
                f"a kernel has weights of {BITS} bits in groups of {GROUP_SIZES} that divide the "
                f"inputs; here {bits} bits, groups of {group_size}, {in_features} inputs and "
                f"{out_features} outputs"
            )
        weights = -(-out_features // layout.UNIT) * layout.UNIT * in_features
        self._bytes[sizes] = weights * bits // 8, weights // group_size * 2
        return self._bytes[sizes]


class Int8Product(NativeProduct):
    """The same with activations that are rounded to 8 bits, 32 that share a scale.

    That is how llama.cpp computes (its Q8_0).
    """

    name = "int8"
    kernel = INT8_KERNEL
    functions = ("groupwise_int8_linear", "groupwise_int8_linears")


def _unreadable(
    hidden: torch.Tensor,
    packed: Quantized,
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int, int],
) -> ExecutionError:
    in_features, out_features, group_size, bits = sizes
    takes = (
        f"{listed(DTYPES[bits])} [..., {in_features}] on the CPU, a bias like it and, for it and "
        f"{out_features} outputs, dense packed weights of {bits} bits in groups of {group_size} "
        "with bfloat16 scales"
    )
    return unreadable(
        name_of(bits), takes, hidden=hidden, qweight=packed[0], scales=packed[1], bias=bias
    )
