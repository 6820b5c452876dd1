"""Operators that work number by number, as steps of a chain."""

from __future__ import annotations

from typing import Any

import torch

from jackfield_plugins.compiler.native.chains import Given, Step
from jackfield_plugins.compiler.native.graph import meta_of

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
            "load", "store", "number", "spread", "fold_sum", "fold_mean", "fold_most",
        )
    )
}  # fmt: skip

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


def step_of(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """(`Step`, its tensors, what its numbers are computed in) of a call of the operator `target`.

    Tensors, also `out`, may be without data. None: it is no such operator, or the kernel has no
    such dtype.
    """
    if (simple := lowered(target, args, kwargs)) is None:
        return None
    operation, inputs, factor = simple
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    if not tensors or any(t.dtype not in DTYPES for t in (*tensors, out)):
        return None
    computed = _computed(operation, inputs, tensors, out)
    if computed is None:
        return None
    if operation in _COMPARED:
        inputs = tuple(_rounded(one, tensors[0].dtype) for one in inputs)
    numbered = iter(range(len(tensors)))
    read = tuple(Given(next(numbered)) if isinstance(o, torch.Tensor) else o for o in inputs)
    return Step(operation, read, factor, meta_of(out)), tensors, computed


IN_FLOAT, IN_DOUBLE, IN_WHOLE = range(3)  # in the order of `Computed`
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
        return IN_WHOLE
    if whole and exact and not out.dtype.is_floating_point:
        return IN_WHOLE if operation in _OF_WHOLE | _COMPARED else None
    if operation == "floor_divide":
        return None  # of real numbers
    mixed = len(dtypes) > 1
    if operation in _COMPARED:
        if mixed and (not dtypes.isdisjoint(_INTEGERS) or any(t.dim() == 0 for t in tensors)):
            return None  # one is rounded to the other's dtype first
        return IN_DOUBLE if torch.result_type(*inputs) is torch.float64 else IN_FLOAT
    if operation in _LOGICAL:
        return IN_DOUBLE
    if operation != "copy":
        if not out.dtype.is_floating_point:
            return None
        if out.dtype.itemsize == 2 and not dtypes.isdisjoint(_INTEGERS):
            return None  # whole numbers are rounded first
    return IN_FLOAT if out.dtype.is_floating_point and out.dtype.itemsize < 8 else IN_DOUBLE


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """What a number is beside tensors of this dtype, which it is compared with."""
    if isinstance(number, torch.Tensor):
        return number
    return torch.tensor(number, dtype=dtype).item() if dtype.is_floating_point else number
