"""The operators that the kernel here has, each as a call of it on the tensors of a step."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jackfield.contracts.native import NativeCall
from jackfield_plugins.compiler.native.chains import FUSED, Chain
from jackfield_plugins.compiler.native.laying import chained, joined
from jackfield_plugins.compiler.native.linears import FLOATS, addmm, address, linear
from jackfield_plugins.compiler.native.pointwise import DTYPES, step_of
from jackfield_plugins.compiler.native.selecting import SELECTING

_ROWS = struct.Struct("@12qd")
_CLEAR = struct.Struct("@2q")
_GATHER = struct.Struct("@6q")
_MATMUL = struct.Struct("@17q")
_SMALL = 1 << 16  # multiplications, up to which a plain loop will do


def native_calls(
    target: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> list[NativeCall] | None:
    """The kernel's calls, one after the other, for an operator of torch; None: it has none.

    `out` is a tensor, or a list of them for an operator that makes several.
    """
    if isinstance(out, torch.Tensor) and not out.numel():
        return []
    if (own := _OWN.get(target)) is not None:
        found: Any = own(out, *args, **kwargs)
        return [found] if isinstance(found, NativeCall) else found
    if not isinstance(out, torch.Tensor):
        return None
    if (found := step_of(target, tuple(args), kwargs, out)) is None:
        return None
    step, tensors, computed = found
    call = chained(out, *tensors, chain=Chain((step,), (0,), computed))
    return None if call is None else [call]


def cleared(out: torch.Tensor) -> NativeCall:
    """The call that fills a contiguous tensor with 0."""
    return NativeCall(address("clear"), _CLEAR.pack(out.data_ptr(), out.nbytes), (out,))


def _embedding(
    out: torch.Tensor, table: torch.Tensor, index: torch.Tensor, *_: Any
) -> NativeCall | None:
    return _gather(out, table, 0, index)


def _gather(
    out: torch.Tensor, table: torch.Tensor, dim: int, index: torch.Tensor
) -> NativeCall | None:
    if not (
        dim == 0
        and table.is_contiguous()
        and index.is_contiguous()
        and index.dtype is torch.int64
        and out.is_contiguous()
        and out.dtype is table.dtype
        and out.shape == (*index.shape, *table.shape[1:])
    ):
        return None
    piece = table[:1].numel() * table.element_size()  # the stride of a single row says nothing
    arguments = _GATHER.pack(
        table.data_ptr(), len(table), piece, index.data_ptr(), index.numel(), out.data_ptr()
    )
    return NativeCall(address("gather"), arguments, (table, index, out))


def _indexed(out: torch.Tensor, table: torch.Tensor, indices: list[Any]) -> NativeCall | None:
    if len(indices) != 1 or not isinstance(indices[0], torch.Tensor):
        return None
    return _gather(out, table, 0, indices[0])


def rows_of(x: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """(groups, rows, size, stride of a group, of a row); None: too irregular for the kernel."""
    if not x.dim() or x.dtype not in FLOATS or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return None
    size, (outer, *_) = joined(list(x.shape[:-1]), [list(x.stride()[:-1])])
    if len(size) > 2:
        return None
    groups, rows = size if len(size) == 2 else [1, *size]
    group_stride, row_stride = outer if len(size) == 2 else [0, *outer]
    return groups, rows, x.shape[-1], group_stride, row_stride


def _columns_of(x: torch.Tensor, dim: int) -> tuple[int, int, int, int, int] | None:
    """The same of the rows along `dim`, which become one."""
    if x.dtype not in FLOATS or not x.is_contiguous():
        return None
    size = math.prod(x.shape[dim + 1 :])  # the stride of one that is alone says nothing
    return math.prod(x.shape[:dim]), x.shape[dim], size, x.shape[dim] * size, size


def can_hold(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether what is computed of rows `x` is rounded as `out` is due: torch casts `x` first."""
    widened = out.dtype is torch.float32 and x.dtype.itemsize == 2
    return out.is_contiguous() and (out.dtype is x.dtype or widened)


def _folds(operation: int) -> Callable[..., NativeCall | None]:
    def fold(
        out: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> NativeCall | None:
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or not x.dim() or len(dims) != 1:
            return None
        dim = dims[0] % x.dim()
        found = rows_of(x) if dim == x.dim() - 1 else _columns_of(x, dim)
        if found is None or not can_hold(out, x):
            return None
        arguments = _ROWS.pack(
            operation, DTYPES[x.dtype], DTYPES[out.dtype], *found, x.data_ptr(), out.data_ptr(),
            0, 0, 0.0,
        )  # fmt: skip
        name = "fold_rows" if dim == x.dim() - 1 else "fold_columns"
        return NativeCall(address(name), arguments, (x, out))

    return fold


def _softmax(out: torch.Tensor, x: torch.Tensor, dim: int, *_: Any, **__: Any) -> NativeCall | None:
    found = rows_of(x) if x.dim() and dim % x.dim() == x.dim() - 1 else None
    if found is None or not can_hold(out, x):
        return None
    arguments = _ROWS.pack(
        0, DTYPES[x.dtype], DTYPES[out.dtype], *found, x.data_ptr(), out.data_ptr(), 0, 0, 0.0
    )
    return NativeCall(address("softmax_rows"), arguments, (x, out))


def _layer_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> NativeCall | None:
    found = rows_of(x) if len(shape) == 1 else None
    dense = all(
        t is None or (t.dtype is x.dtype and list(t.shape) == shape and t.is_contiguous())
        for t in (weight, bias)
    )
    if found is None or not dense or not out.is_contiguous() or out.dtype is not x.dtype:
        return None
    arguments = _ROWS.pack(
        0, DTYPES[x.dtype], DTYPES[out.dtype], *found, x.data_ptr(), out.data_ptr(),
        0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(), epsilon,
    )  # fmt: skip
    return NativeCall(address("norm_rows"), arguments, (x, weight, bias, out))


def _matmul(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> NativeCall | None:
    if left.dim() < 2 or right.dim() < 2 or not left.dtype is right.dtype is out.dtype:
        return None
    inner = left.shape[-1]
    if out.dtype not in FLOATS or out.numel() * inner > _SMALL:
        return None
    outer = out.shape[:-2]
    spread = (left.expand(*outer, *left.shape[-2:]), right.expand(*outer, *right.shape[-2:]), out)
    batch, strides = joined(list(outer), [list(one.stride()[:-2]) for one in spread])
    if len(batch) > 1:
        return None
    rest = [(stride[0], *one.stride()[-2:]) for stride, one in zip(strides, spread, strict=True)]
    arguments = _MATMUL.pack(
        DTYPES[out.dtype], *batch, out.shape[-2], out.shape[-1], inner,
        left.data_ptr(), right.data_ptr(), out.data_ptr(), *(n for three in rest for n in three),
    )  # fmt: skip
    return NativeCall(address("matmul"), arguments, (left, right, out))


_OWN: dict[str, Callable[..., Any]] = {
    FUSED: chained,
    "aten.linear.default": linear,
    "aten.addmm.default": addmm,
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _gather,
    "aten.index.Tensor": _indexed,
    "aten.mean.dim": _folds(1),
    "aten.sum.dim_IntList": _folds(0),
    "aten.amax.default": _folds(2),
    "aten._softmax.default": _softmax,
    "aten.softmax.int": _softmax,
    "aten.layer_norm.default": _layer_norm,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.mm.default": _matmul,
    **SELECTING,
}
