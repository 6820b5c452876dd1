"""Operators that work number by number, as calls of the kernel's `pointwise`."""

from __future__ import annotations

import struct
from typing import Any

import torch

#: The kernel's numbers for dtypes, in the order of `Dtype`.
DTYPES = {
    dtype: at
    for at, dtype in enumerate(
        (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
            torch.bool,
        )
    )
}  # fmt: skip

#: The kernel's numbers for operations, in the order of `Operation`.
OPERATIONS = {
    name: at
    for at, name in enumerate(
        (
            "copy", "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh",
            "sigmoid", "silu", "gelu", "gelu_tanh", "relu", "square", "logical_not", "softplus",
            "floor", "erf", "expm1", "log1p", "add", "sub", "mul", "div", "pow", "maximum",
            "minimum", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "where", "clamp",
            "floor_divide",
        )
    )
}  # fmt: skip

_DIMS, _INPUTS = 6, 3
_HEAD = struct.Struct(f"@5q{_DIMS}q")
_OUT = struct.Struct(f"@2q{_DIMS}q8s")
_INPUT = struct.Struct(f"@2q{_DIMS}q8s")

_UNARY = {
    f"aten.{name}.default": name
    for name in (
        "square",
        "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid",
        "silu", "relu", "logical_not", "floor", "erf", "expm1", "log1p",
    )
}  # fmt: skip
_BINARY = {
    "aten.add.Tensor": "add", "aten.add.Scalar": "add", "aten.sub.Tensor": "sub",
    "aten.sub.Scalar": "sub", "aten.mul.Tensor": "mul", "aten.mul.Scalar": "mul",
    "aten.div.Tensor": "div", "aten.div.Scalar": "div", "aten.pow.Tensor_Tensor": "pow",
    "aten.maximum.default": "maximum", "aten.minimum.default": "minimum",
    "aten.max.other": "maximum", "aten.min.other": "minimum",
    "aten.logical_and.default": "and", "aten.logical_or.default": "or",
}  # fmt: skip
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _BINARY |= {f"aten.{_name}.Tensor": _name, f"aten.{_name}.Scalar": _name}
_COPIES = frozenset(
    {
        "aten._to_copy.default", "aten.clone.default", "aten.contiguous.default", "aten.to.dtype",
        "aten.type_as.default",
    }
)  # fmt: skip


def lowered(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(operation, inputs, factor) of a call of the operator `target`; None: it is no such one."""
    if target in _COPIES:
        return "copy", args[:1], 1.0
    if name := _UNARY.get(target):
        return name, args[:1], 1.0
    if name := _BINARY.get(target):
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        return name, args[:2], alpha
    if target == "aten.pow.Tensor_Scalar":
        simple = {2: "square", 0.5: "sqrt", 1: "copy", -0.5: "rsqrt"}.get(args[1])
        return (simple, args[:1], 1.0) if simple else ("pow", args[:2], 1.0)
    if target == "aten.rsub.Scalar" and len(args) == 2 and not kwargs:
        return "sub", (args[1], args[0]), 1.0
    if target == "aten.gelu.default":
        form = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}[form], args[:1], 1.0
    if target == "aten.softplus.default" and len(args) == 1:
        return "softplus", args, 1.0
    if target == "aten.bitwise_not.default" and args[0].dtype is torch.bool:
        return "logical_not", args, 1.0
    if target == "aten.floor_divide.default" and isinstance(args[1], int) and args[1]:
        return "floor_divide", args, 1.0
    if target == "aten.where.self":
        return "where", args, 1.0
    if target == "aten.masked_fill.Scalar":
        return "where", (args[1], args[2], args[0]), 1.0
    if target in ("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"):
        bounds = _bounds(target, args, kwargs)
        return None if any(bound != bound for bound in bounds[1:]) else ("clamp", bounds, 1.0)
    return None


def _bounds(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    low, high = kwargs.get("min"), kwargs.get("max")
    rest = args[1:]
    if target == "aten.clamp_max.default":
        high = rest[0] if rest else high
    else:
        low, high = (rest + (low, high)[len(rest) :])[:2]
    return args[0], -float("inf") if low is None else low, float("inf") if high is None else high


def packed(
    operation: str, inputs: tuple[Any, ...], factor: float, out: torch.Tensor
) -> bytes | None:
    """`struct Pointwise` of a call; None: the kernel has no such dtype, or too many dimensions."""
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    if not tensors or any(t.dtype not in DTYPES for t in (*tensors, out)):
        return None
    computed = _computed(operation, inputs, tensors, out)
    if computed is None:
        return None
    columns = [list(out.stride())]
    columns += [
        list(one.expand(out.shape).stride()) for one in inputs if isinstance(one, torch.Tensor)
    ]
    size, (out_stride, *strides) = joined(list(out.shape), columns)
    if len(size) > _DIMS:
        return None
    fill = [0] * (_DIMS - len(size))
    number, threads = _whole if computed == _IN_WHOLE else _real, torch.get_num_threads()
    whole = [
        _HEAD.pack(OPERATIONS[operation], computed, len(inputs), len(size), threads, *size, *fill),
        _OUT.pack(out.data_ptr(), DTYPES[out.dtype], *out_stride, *fill, number(factor)),
    ]
    for one in inputs:
        if isinstance(one, torch.Tensor):
            where = one.data_ptr(), DTYPES[one.dtype], *strides.pop(0), *fill
            whole.append(_INPUT.pack(*where, bytes(8)))
        else:
            told = _rounded(one, tensors[0].dtype) if operation in _COMPARED else one
            whole.append(_INPUT.pack(0, 0, *[0] * _DIMS, number(told)))
    whole += [_INPUT.pack(0, 0, *[0] * _DIMS, bytes(8))] * (_INPUTS - len(inputs))
    return b"".join(whole)


_IN_FLOAT, _IN_DOUBLE, _IN_WHOLE = range(3)  # in the order of `Computed`
_INTEGERS = (torch.int64, torch.int32)
_COMPARED = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_LOGICAL = frozenset({"logical_not", "and", "or"})
#: What makes whole numbers of whole numbers.
_OF_WHOLE = frozenset(
    {
        "copy", "neg", "abs", "square", "add", "sub", "mul", "maximum", "minimum", "where", "clamp",
        "floor_divide",
    }
)  # fmt: skip


def _computed(
    operation: str, inputs: tuple[Any, ...], tensors: list[torch.Tensor], out: torch.Tensor
) -> int | None:
    """What numbers are computed in, so that they are what torch makes; None: in nothing here."""
    dtypes = {t.dtype for t in tensors}
    whole = not any(dtype.is_floating_point for dtype in dtypes)
    exact = all(isinstance(one, int | torch.Tensor) or abs(one) == float("inf") for one in inputs)
    if whole and operation in _LOGICAL | {"copy"}:
        return _IN_WHOLE
    if whole and exact and not out.dtype.is_floating_point:
        return _IN_WHOLE if operation in _OF_WHOLE | _COMPARED else None
    if operation == "floor_divide":
        return None  # of real numbers
    mixed = len(dtypes) > 1
    if operation in _COMPARED:
        if mixed and (not dtypes.isdisjoint(_INTEGERS) or any(t.dim() == 0 for t in tensors)):
            return None  # one is rounded to the other's dtype first
        return _IN_DOUBLE if torch.result_type(*inputs) is torch.float64 else _IN_FLOAT
    if operation in _LOGICAL:
        return _IN_DOUBLE
    if operation != "copy":
        if not out.dtype.is_floating_point:
            return None
        if out.dtype.itemsize == 2 and not dtypes.isdisjoint(_INTEGERS):
            return None  # whole numbers are rounded first
    return _IN_FLOAT if out.dtype.is_floating_point and out.dtype.itemsize < 8 else _IN_DOUBLE


def _real(number: float) -> bytes:
    return struct.pack("@d", number)


def _whole(number: float) -> bytes:
    """Infinities are the ends of what there is."""
    ends = {float("inf"): 2**63 - 1, -float("inf"): -(2**63)}
    return struct.pack("@q", ends[number] if number in ends else int(number))


def _rounded(number: float, dtype: torch.dtype) -> float:
    """What a number is beside tensors of this dtype, which it is compared with."""
    return torch.tensor(number, dtype=dtype).item() if dtype.is_floating_point else number


def joined(size: list[int], columns: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same numbers in fewer dimensions: those of one are left out, regular neighbours are one.

    `columns` are strides of tensors of this size.
    """
    kept: list[tuple[int, list[int]]] = []
    for d, n in enumerate(size):
        strides = [column[d] for column in columns]
        if n == 1:
            continue
        if kept and all(a == n * b for a, b in zip(kept[-1][1], strides, strict=True)):
            kept[-1] = (kept[-1][0] * n, strides)
        else:
            kept.append((n, strides))
    kept = kept or [(1, [0] * len(columns))]
    return [n for n, _ in kept], [[s[at] for _, s in kept] for at in range(len(columns))]
