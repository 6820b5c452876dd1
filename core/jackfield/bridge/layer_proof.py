"""The proof of a kernel: its functions against the layers that they stand in for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear

from jackfield.errors import ExecutionError, quoted
from jackfield.guarded import fault, guarded
from jackfield.registry.backends import Registered

#: Of the random rows on which both are compared; many, as kernels do several at a time.
_SHAPES = ((1,), (2,), (5,), (2, 3), (33,))
_ROUNDINGS = 4
_FLOAT32 = torch.finfo(torch.float32).eps
_AT_ONCE = 1 << 22  # weights of a linear in float64: 32 MiB

NOT_OF_ONE_TENSOR = (
    "which is no layer of one tensor, as those of a FusedLayer are; its `fits` has to refuse it "
    "(a rotation is a FusedRotary)"
)

Forward = Callable[..., Any]


@torch.no_grad()
def prove(registered: Registered, pairs: Sequence[tuple[nn.Module, Forward]]) -> None:
    """Refuse functions that do not compute what their layers do, by ExecutionError.

    A layer of each kind is compared with float64, then each layer with itself, all functions having
    been called before the first result is looked at: one may have another's weights, or its output.
    """
    off: dict[object, float] = {}
    for module, forward in pairs:
        kind = _kind(module)
        if kind not in off:
            off[kind] = compare(registered, module, forward)
    given = [_rows(module, ((5,),))[0] for module, _ in pairs]
    found = [_called(registered, *pair, rows) for pair, rows in zip(pairs, given, strict=True)]
    for (module, _), rows, new in zip(pairs, given, found, strict=True):
        own = module(rows)
        _alike(registered, module, own, new)
        scale, (rounding, summed) = own.double().abs().max(), _epsilons(module)
        allowed = (4 * off[_kind(module)] + 2 * (_ROUNDINGS * rounding + summed)) * scale
        _hold(registered, module, (new.double() - own.double()).abs().max(), allowed)


def _kind(module: nn.Module) -> object:
    return type(module), tuple((name, p.shape) for name, p in module.named_parameters())


@torch.no_grad()
def compare(registered: Registered, module: nn.Module, forward: Forward) -> float:
    """Refuse a function whose numbers differ from the layer's in float64 by more than rounding.

    That is twice what the layer's own do, a few roundings of the largest, as the layer may have
    been lucky, and what a sum in float32 of one product after the other is off by. The largest is
    that of all rows: an output of one row may be next to nothing, its rounding is not. Returns how
    far the layer's own are off, as a share of the largest.
    """
    given, most = _rows(module, _SHAPES), 0.0
    every = [_own(registered, module, some) for some in given]
    true, (rounding, summed) = _in_float64(module, given), _epsilons(module)
    scale = torch.stack([exact.abs().max() for exact in true]).max()
    for some, own, exact in zip(given, every, true, strict=True):
        new = _called(registered, module, forward, some)
        _alike(registered, module, own, new)
        off = (own.double() - exact).abs().max()
        allowed = 2 * off + (_ROUNDINGS * rounding + summed) * scale
        _hold(registered, module, (new.double() - exact).abs().max(), allowed)
        most = max(most, float(off / scale.clamp(min=1e-300)))
    return most


def own_rows(module: nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """What the layer itself makes of them; None where it is `NOT_OF_ONE_TENSOR`."""
    try:
        found = module(rows)
    except TypeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _own(registered: Registered, module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found = own_rows(module, rows)
    if found is None:
        raise ExecutionError(f"{registered} fits {type(module).__name__}, {NOT_OF_ONE_TENSOR}")
    return found


def _rows(module: nn.Module, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parameter, draw = next(module.parameters()), torch.Generator().manual_seed(0)
    rows = [torch.randn(*shape, parameter.shape[-1], generator=draw) for shape in shapes]
    return [some.to(parameter.device, parameter.dtype) for some in rows]


def _called(
    registered: Registered, module: nn.Module, forward: Forward, rows: torch.Tensor
) -> torch.Tensor:
    lent = rows.clone()
    with guarded(registered, f"its function in the place of {type(module).__name__}"):
        new = forward(lent)
    if not isinstance(new, torch.Tensor):
        raise fault(registered, f"its function must return a tensor, got {quoted(new)}")
    if not torch.equal(lent, rows):
        raise ExecutionError(f"{registered} writes into what {type(module).__name__} is given")
    return new


def _alike(registered: Registered, module: nn.Module, own: torch.Tensor, new: torch.Tensor) -> None:
    if new.shape != own.shape:
        raise ExecutionError(f"{registered} gives {list(new.shape)}, and {list(own.shape)} is due")
    if new.dtype is not own.dtype:
        raise ExecutionError(
            f"{registered} gives {new.dtype} for {type(module).__name__}, and {own.dtype} is due"
        )


def of_a_sum(size: int, eps: float = _FLOAT32) -> float:
    """What a sum in float32 of `size` products, one after the other, may be off by, as a share.

    Each partial sum is rounded, and the errors grow with the root of their number: the worst of
    9,800 sums is off by 0.2 to 0.4 of it. Of 8,192 products whose inputs were rounded to
    TensorFloat-32 it is 16 times the whole of it.
    """
    return math.sqrt(size) * eps


def _epsilons(module: nn.Module) -> tuple[float, float]:
    """Of a rounding to the layer's dtype, and of a sum in no less than float32."""
    parameter = next(module.parameters())
    eps = torch.finfo(parameter.dtype).eps
    return eps, of_a_sum(parameter.shape[-1], min(eps, _FLOAT32))


def _in_float64(module: nn.Module, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a layer says of each of `given` in float64. Of a linear a few outputs at a time: the
    weights of an output head may take more, four times as wide, than there is room for.
    """
    wide = [some.double() for some in given]
    if type(module) is nn.Linear and type(module.weight) is nn.Parameter:
        rows, bias = torch.cat([some.flatten(0, -2) for some in wide]), module._parameters["bias"]
        count = max(1, _AT_ONCE // max(1, module.weight.shape[1]))
        found = []
        for at in range(0, len(module.weight), count):
            part = slice(at, at + count)
            more = None if bias is None else bias[part].double()
            found.append(linear(rows, module.weight[part].double(), more))
        whole = torch.cat(found, -1).split([some[..., 0].numel() for some in wide])
        return [part.view(*some.shape[:-1], -1) for part, some in zip(whole, wide, strict=True)]
    own = (*module.named_parameters(), *module.named_buffers())
    numbers = {name: one.double() if one.is_floating_point() else one for name, one in own}
    return [functional_call(module, numbers, some).double() for some in wide]


def _hold(
    registered: Registered, module: nn.Module, off: torch.Tensor, allowed: torch.Tensor
) -> None:
    if not off <= allowed:
        raise ExecutionError(
            f"{registered} does not compute what {type(module).__name__} does: it is off by "
            f"{off:.3g}, where {allowed:.3g} is due to rounding"
        )
