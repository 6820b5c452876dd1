"""The kernel written here (`kernel.cpp`), called with tensors.

A model calls it hundreds of times a token, so little is done in a call: all arguments travel in
one packed struct, and addresses are read anew each time, since a module can be moved or copied.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from jackfield.contracts import NativeCall
from jackfield.contracts.advice import advising
from jackfield.errors import ExecutionError
from jackfield_plugins.native import NativeKernel, pages
from jackfield_plugins.native.arguments import is_bias, unreadable

UNIT = 64  # outputs that lie side by side

_PACK_LINEAR = struct.Struct("@10q").pack  # the structs of kernel.cpp
_PACK_ROWS = struct.Struct("@9q").pack
_PACK_PACK = struct.Struct("@6q").pack
_threads = torch.get_num_threads
_DTYPES = (torch.bfloat16, torch.float32)
_NAMES = (("gguf_linear", "gguf_linears"), ("gguf_int8_linear", "gguf_int8_linears"))


class Blocks(NamedTuple):
    """A type of blocks: ggml's number of it, the inputs of a block, its bytes in a file and, of
    one output, in memory (scales of 6 bits become bytes).
    """

    number: int
    inputs: int
    stored: int
    held: int


BLOCKS = {
    "Q4_0": Blocks(2, 32, 18, 18),
    "Q4_1": Blocks(3, 32, 20, 20),
    "Q5_0": Blocks(6, 32, 22, 22),
    "Q5_1": Blocks(7, 32, 24, 24),
    "Q8_0": Blocks(8, 32, 34, 34),
    "Q4_K": Blocks(12, 256, 144, 148),
    "Q5_K": Blocks(13, 256, 176, 180),
    "Q6_K": Blocks(14, 256, 210, 210),
}


Kernels = Mapping[str, NativeKernel]


def _kernels(name: str, folder: Path, instead: str) -> Kernels:
    """One of each type: a file has two or three, and all together take minutes to compile."""
    return {
        kind: NativeKernel(
            f"{name}-{kind}", folder, instead, (f"TYPES=CASE({kind})", f"HELD={blocks.held}")
        )
        for kind, blocks in BLOCKS.items()
    }


KERNELS = _kernels("gguf", Path(__file__).parent, "quantization='gguf?kernel=none'")
#: Products with activations that are rounded to 8 bits; compiled where they are asked for.
INT8_KERNELS = _kernels(
    "gguf-int8", Path(__file__).parent / "int8", "quantization='gguf?activations=dtype'"
)


def cannot_load(kernels: Kernels, kinds: Iterable[str]) -> list[str]:
    """Why those of some types cannot be had; what never was compiled is now, side by side."""
    wanted = [kernels[kind] for kind in dict.fromkeys(kinds) if kind in kernels]
    if not wanted or advising():
        return next(iter(kernels.values())).cannot_build()
    beside = os.cpu_count() or 1
    for at in range(0, len(wanted), beside):
        # Daemons: who is interrupted need not wait for compilers.
        threads = [Thread(target=one.cannot_load, daemon=True) for one in wanted[at : at + beside]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return next(filter(None, (kernel.cannot_load() for kernel in wanted)), [])


class Matrix(NamedTuple):
    """What a packed weight stands for."""

    kind: str
    out_features: int
    in_features: int

    @property
    def row_bytes(self) -> int:
        """Of a row in the file."""
        return self.in_features // BLOCKS[self.kind].inputs * BLOCKS[self.kind].stored

    @property
    def nbytes(self) -> int:
        """Of all that is packed; outputs are filled up to `UNIT`."""
        return -(-self.out_features // UNIT) * self._unit_bytes

    @property
    def _unit_bytes(self) -> int:
        return UNIT * self.in_features // BLOCKS[self.kind].inputs * BLOCKS[self.kind].held


def pack(blocks: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The kernel's layout of a file's blocks, uint8 `[out_features, row_bytes]`.

    Raises ExecutionError for others, and where a scale is infinite or not a number.
    """
    if (
        blocks.dtype is not torch.uint8
        or blocks.shape != (matrix.out_features, matrix.row_bytes)
        or blocks.layout is not torch.strided
        or not (blocks.is_cpu and blocks.data_ptr())
    ):
        takes = f"blocks of {matrix.kind}, uint8 {[matrix.out_features, matrix.row_bytes]}"
        raise unreadable("gguf", takes, blocks=blocks)
    blocks = blocks.contiguous()
    packed = pages.zeros(matrix.nbytes)
    number = BLOCKS[matrix.kind].number
    call = (blocks.data_ptr(), packed.data_ptr(), matrix.in_features, matrix.out_features)
    if not _function(matrix.kind, "gguf_pack")(_PACK_PACK(*call, number, _threads())):
        raise ExecutionError(f"blocks of {matrix.kind} with a scale that is no finite number")
    return packed


def linear(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    matrix: Matrix,
    int8: bool = False,
) -> torch.Tensor:
    """`[..., in_features]` of bfloat16 or float32 to `[..., out_features]` of the same.

    `int8` rounds activations to 8 bits, 32 that share a scale, as llama.cpp's Q8_0 does. Raises
    ExecutionError where the kernel cannot read them.
    """
    if not hidden.is_contiguous():
        hidden = hidden.contiguous()
    out = hidden.new_empty((*hidden.shape[:-1], matrix.out_features))
    arguments = _of_linear(hidden, packed, bias, matrix, out)
    function = _int8_function if int8 else _function
    if out.numel() and not function(matrix.kind, _NAMES[int8][0])(arguments):
        raise ExecutionError(f"gguf: the kernel of {matrix.kind} has no such product")
    return out


def native_linear(
    out: torch.Tensor,
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    *matrix_and_int8: Any,
) -> NativeCall | None:
    """The call that writes what `linear` returns into `out`; None for strided tensors."""
    *matrix, int8 = matrix_and_int8
    if not (hidden.is_contiguous() and out.is_contiguous() and out.numel()):
        return None
    arguments = _of_linear(hidden, packed, bias, Matrix(*matrix), out)
    keeps = (hidden, packed, bias, out)
    address = _int8_address if int8 else _address
    one, several = (address(matrix[0], name) for name in _NAMES[int8])
    return NativeCall(one, arguments, keeps, several, by_row=True)


def _of_linear(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    matrix: Matrix,
    out: torch.Tensor,
) -> bytes:
    """`struct LinearCall` of a product into `out`. Raises ExecutionError."""
    kind, out_features, in_features = matrix
    shape, dtype = hidden.shape, hidden.dtype
    if not (
        hidden.is_cpu
        and dtype in _DTYPES
        and shape
        and shape[-1] == in_features
        and packed.is_cpu
        and packed.dtype is torch.uint8
        and packed.nbytes == _nbytes(matrix)
        and packed.is_contiguous()
        and (bias is None or is_bias(bias, out_features, dtype))
    ):
        raise _unreadable(hidden, packed, bias, matrix)
    read, weight = hidden.data_ptr(), packed.data_ptr()
    if out.numel() and not (read and weight):
        raise _unreadable(hidden, packed, bias, matrix)
    return _PACK_LINEAR(
        read, out.data_ptr(), weight, 0 if bias is None else bias.data_ptr(),
        hidden.numel() // in_features, in_features, out_features, BLOCKS[kind].number,
        dtype is torch.float32, _threads(),
    )  # fmt: skip


def rows(
    index: torch.Tensor, packed: torch.Tensor, matrix: Matrix, dtype: torch.dtype
) -> torch.Tensor:
    """The rows `index` (int64, of any shape) of the matrix, in bfloat16 or float32.

    Raises ExecutionError where there is no such row, or the kernel cannot read what it is given.
    """
    if index.is_cpu and index.layout is torch.strided and index.dtype is torch.int32:
        index = index.to(torch.int64)
    if not index.is_contiguous():
        index = index.contiguous()
    out = torch.empty(*index.shape, matrix.in_features, dtype=dtype)
    arguments = _of_rows(index, packed, matrix, out)
    if out.numel() and not _function(matrix.kind, "gguf_rows")(arguments):
        low, high = (int(end) for end in index.aminmax())
        raise ExecutionError(f"gguf: row {low if low < 0 else high} of {matrix.out_features}")
    return out


def native_rows(
    out: torch.Tensor, index: torch.Tensor, packed: torch.Tensor, *matrix_and_dtype: Any
) -> NativeCall | None:
    """The call that writes what `rows` returns into `out`; None for strided tensors."""
    *matrix, _ = matrix_and_dtype
    whole = index.dtype is torch.int64 and index.is_contiguous() and out.is_contiguous()
    if not (whole and out.numel()):
        return None
    arguments = _of_rows(index, packed, Matrix(*matrix), out)
    return NativeCall(_address(matrix[0], "gguf_rows"), arguments, (index, packed, out))


def _of_rows(index: torch.Tensor, packed: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> bytes:
    """`struct RowsCall` of rows into `out`. Raises ExecutionError."""
    if not (
        index.is_cpu
        and index.layout is torch.strided
        and index.dtype is torch.int64
        and packed.is_cpu
        and packed.dtype is torch.uint8
        and packed.nbytes == _nbytes(matrix)
        and packed.is_contiguous()
        and packed.data_ptr()
        and (index.data_ptr() or not index.numel())
        and out.dtype in _DTYPES
    ):
        raise _unreadable_rows(index, packed, matrix)
    return _PACK_ROWS(
        index.data_ptr(), out.data_ptr(), packed.data_ptr(), index.numel(), matrix.out_features,
        matrix.in_features, BLOCKS[matrix.kind].number, out.dtype is torch.float32, _threads(),
    )  # fmt: skip


@functools.cache
def _nbytes(matrix: Matrix) -> int:
    return matrix.nbytes


def _function_of(kernels: Kernels) -> Callable[[str, str], Callable[[bytes], bool]]:
    return functools.cache(lambda kind, name: kernels[kind].function(name))


def _address_of(kernels: Kernels) -> Callable[[str, str], int]:
    return functools.cache(lambda kind, name: kernels[kind].address(name))


_function, _int8_function = _function_of(KERNELS), _function_of(INT8_KERNELS)
_address, _int8_address = _address_of(KERNELS), _address_of(INT8_KERNELS)


def _unreadable_rows(index: torch.Tensor, packed: torch.Tensor, matrix: Matrix) -> ExecutionError:
    takes = f"numbers of rows, int64, and {matrix.nbytes:,} dense bytes of {matrix.kind}"
    return unreadable("gguf", takes, index=index, packed=packed)


def _unreadable(
    hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, matrix: Matrix
) -> ExecutionError:
    takes = (
        f"bfloat16 or float32 [..., {matrix.in_features}] on the CPU, a bias like it and, for it "
        f"and {matrix.out_features} outputs, {matrix.nbytes:,} dense bytes of {matrix.kind}"
    )
    return unreadable("gguf", takes, hidden=hidden, packed=packed, bias=bias)
