"""Operators without a native form: called from Python, on the tensors of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def entered(target: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """What has torch compute an operator into `out`, a tensor or a list of them."""
    direct = _INTO.get(target)
    found = None if direct is None or kwargs else direct(out, *args)
    return found or _copied(operator(target), args, kwargs, out)


def operator(target: str) -> Callable[..., Any]:
    """torch's operator, by the name that it has in a graph."""
    space, name, overload = target.split(".")
    found: Any = getattr(getattr(getattr(torch.ops, space), name), overload)
    return found  # type: ignore[no-any-return]


def _copied(
    run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> Callable[[], None]:
    outs = out if isinstance(out, list) else [out]

    def call() -> None:
        found = run(*args, **kwargs)
        for place, one in zip(outs, found if isinstance(out, list) else [found], strict=True):
            if place is not None:
                place.copy_(one)

    return call


def _linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Callable[[], None] | None:
    """As torch does it: one product of all rows, whatever dimensions they have."""
    if not (x.dim() > 1 and x.is_contiguous() and out.is_contiguous() and weight.dim() == 2):
        return None
    return _product(out.flatten(0, -2), bias, x.flatten(0, -2), weight.t())


def _addmm(out: torch.Tensor, bias: torch.Tensor, *both: torch.Tensor) -> Callable[[], None]:
    return _product(out, bias, *both)


def _product(
    out: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], None]:
    def call() -> None:
        if bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(bias, x, weight, out=out)

    return call


_INTO: dict[str, Callable[..., Callable[[], None] | None]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
}
