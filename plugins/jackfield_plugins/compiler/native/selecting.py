"""Operators that choose and place rows, as calls of the kernel: routers and experts of mixtures."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from jackfield.contracts.native import NativeCall
from jackfield_plugins.compiler.native.linears import FLOATS, LINEAR, address, form
from jackfield_plugins.compiler.native.pointwise import DTYPES

_CHOSEN = struct.Struct("@8q")
_COUNTED = struct.Struct("@4q2d")
_SUMMED = struct.Struct("@5q")
_PICKED = struct.Struct("@7q")
_PLACED = struct.Struct("@6q")
_EXPERTS = struct.Struct("@6q")
FEW_OF_EXPERTS = 256  # rows of all experts together
_WHOLE = (torch.int64, torch.int32)


def _dense(*tensors: torch.Tensor) -> bool:
    return all(one.is_contiguous() for one in tensors)


def _is_last(x: torch.Tensor, dim: int) -> bool:
    return x.dim() > 0 and dim % x.dim() == x.dim() - 1


def _topk(
    out: Any, x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **other: Any
) -> NativeCall | None:
    """For few of not too many: there torch has one algorithm in all of its versions."""
    values, index = out
    size = x.shape[-1] if x.dim() else 0
    if not (_is_last(x, dim) and largest and not other and x.dtype in FLOATS and _dense(x, *out)):
        return None
    if not 0 < k <= size < 64 * k:
        return None
    arguments = _CHOSEN.pack(
        DTYPES[x.dtype], x.numel() // size, size, size, k, x.data_ptr(), values.data_ptr(),
        index.data_ptr(),
    )  # fmt: skip
    return NativeCall(address("choose_largest"), arguments, (x, *out))


def _sort(out: Any, x: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    values, index = out
    if not (_is_last(x, dim) and x.dtype is torch.int64 and not descending):
        return None
    if not (_dense(x, *out) and x.numel()):
        return None
    size = x.shape[-1]
    arguments = _CHOSEN.pack(
        DTYPES[x.dtype], x.numel() // size, size, size, size, x.data_ptr(), values.data_ptr(),
        index.data_ptr(),
    )  # fmt: skip
    return NativeCall(address("sort_rows"), arguments, (x, *out))


def _histc(
    out: torch.Tensor, x: torch.Tensor, bins: int = 100, *low_high: float, **named: float
) -> NativeCall | None:
    low, high = (*low_high, *(named.get(name, 0) for name in ("min", "max")[len(low_high) :]))
    if not (x.dtype is out.dtype is torch.float32 and _dense(x, out) and high > low):
        return None
    arguments = _COUNTED.pack(x.numel(), bins, x.data_ptr(), out.data_ptr(), low, high)
    return NativeCall(address("count_parts"), arguments, (x, out))


def _cumsum(out: torch.Tensor, x: torch.Tensor, dim: int, **_: Any) -> NativeCall | None:
    if not (x.dim() == 1 and x.dtype in DTYPES and out.dtype in _WHOLE and _dense(x, out)):
        return None
    arguments = _SUMMED.pack(
        DTYPES[x.dtype], DTYPES[out.dtype], x.numel(), x.data_ptr(), out.data_ptr()
    )
    return NativeCall(address("sum_so_far"), arguments, (x, out))


def _gather(
    out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any
) -> NativeCall | None:
    if not (_is_last(x, dim) and index.shape[:-1] == x.shape[:-1] and _dense(x, index, out)):
        return None
    arguments = _picked(x, index, x.data_ptr(), out)
    return NativeCall(address("pick_numbers"), arguments, (x, index, out))


def _scatter(
    out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, value: float
) -> list[NativeCall] | None:
    if not (_is_last(x, dim) and index.shape[:-1] == x.shape[:-1] and _dense(x, index, out)):
        return None
    number = torch.tensor([value], dtype=x.dtype)
    arguments = _picked(x, index, number.data_ptr(), out)
    return [
        _copied(out, x),
        NativeCall(address("put_number"), arguments, (x, number, index, out)),
    ]


def _picked(x: torch.Tensor, index: torch.Tensor, source: int, out: torch.Tensor) -> bytes:
    size, count = x.shape[-1], index.shape[-1]
    rows = index.numel() // max(1, count)
    return _PICKED.pack(
        x.element_size(), rows, size, count, source, index.data_ptr(), out.data_ptr()
    )


def _index_put(
    out: torch.Tensor, x: torch.Tensor, indices: list[Any], values: torch.Tensor, *added: Any
) -> list[NativeCall] | None:
    index = indices[0]
    if any(added) or len(indices) != 1 or index is None or index.dtype is not torch.int64:
        return None
    shape = (*index.shape, *x.shape[1:])
    if not (values.dtype is x.dtype and values.shape == shape and _dense(x, index, values, out)):
        return None
    piece = x[:1].numel() * x.element_size()
    arguments = _PLACED.pack(
        piece, len(x), index.numel(), values.data_ptr(), index.data_ptr(), out.data_ptr()
    )
    return [_copied(out, x), NativeCall(address("place_rows"), arguments, (index, values, out))]


def _copied(out: torch.Tensor, x: torch.Tensor) -> NativeCall:
    """Dense numbers, to another place."""
    arguments = _PLACED.pack(x.nbytes, 1, 1, x.data_ptr(), _FIRST.data_ptr(), out.data_ptr())
    return NativeCall(address("place_rows"), arguments, (x, _FIRST, out))


_FIRST = torch.zeros(1, dtype=torch.int64)


def _experts(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: Any = None, *rest: Any
) -> NativeCall | None:
    """`weight` is `[experts, in_features, out_features]`, in either order of memory."""
    if not (isinstance(ends, torch.Tensor) and ends.dtype in _WHOLE and weight.dim() == 3):
        return None
    if any(one is not None for one in rest) or x.dim() != 2 or len(x) > FEW_OF_EXPERTS:
        return None
    name = form(out, x, weight[0].t(), None)
    if name is None or not _dense(ends) or len(ends) != len(weight):
        return None
    inner, outer = weight.shape[1:]
    row = weight.stride(1 if name.startswith("turned") else 2)
    size = x.element_size()
    first = LINEAR.pack(
        x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), len(x), inner, outer, inner, row,
        outer, torch.get_num_threads(),
    )  # fmt: skip
    rest_of_it = _EXPERTS.pack(
        ends.data_ptr(), DTYPES[ends.dtype], len(weight), weight.stride(0) * size, inner * size,
        outer * size,
    )  # fmt: skip
    return NativeCall(address(f"experts_{name}"), first + rest_of_it, (x, weight, ends, out))


#: Some take several calls, one after the other.
SELECTING: dict[str, Callable[..., NativeCall | list[NativeCall] | None]] = {
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.histc.default": _histc,
    "aten.cumsum.default": _cumsum,
    "aten.gather.default": _gather,
    "aten.scatter.value": _scatter,
    "aten.index_put.default": _index_put,
    "aten._grouped_mm.default": _experts,
    "transformers.grouped_mm_fallback.default": _experts,
}
