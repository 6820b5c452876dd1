"""Another rotation of queries and keys in one attention layer, and its proof."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from jackfield.contracts.kernels import ROTARY, rotary_of
from jackfield.errors import ExecutionError, quoted
from jackfield.guarded import fault, guarded
from jackfield.registry.backends import Registered

_TEXTS = ((1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (1, 33))  # how many, and tokens of each
_ROUNDINGS = 4
CALLS_NONE = f"which calls no {ROTARY}; its `fits` has to refuse it"
TURNS_NO_PAIR = (
    f"whose {ROTARY} takes or returns something else than queries and keys; its `fits` has to "
    "refuse it"
)

Rotation = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


def rotating_by(module: nn.Module, rotation: Rotation) -> Callable[..., Any]:
    """The `forward` of the class of `module`, which rotates by `rotation`; in it alone."""
    own: Any = type(module).forward
    names = {**own.__globals__, ROTARY: rotation}
    made = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(made, module)


@torch.no_grad()
def prove_rotations(
    registered: Registered,
    pairs: Sequence[tuple[nn.Module, Rotation]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse rotations that are not their layers' own, by ExecutionError.

    Numbers may be off the layer's own in float64 by twice what the layer's are, as these may be
    lucky, and by a few roundings of the largest. `dtype` and `device` are those of the layer's
    inputs: its weights may be stored as something else. Of layers of one class, with as many heads,
    all but the first are compared on two texts alone.
    """
    known = set()
    for module, rotation in pairs:
        if (own := rotary_of(module)) is None:
            raise ExecutionError(f"{registered} fits {type(module).__name__}, {CALLS_NONE}")
        kind = type(module), heads_of(module)
        every = _given(module, dtype, device, _TEXTS if kind not in known else _TEXTS[-1:])
        _prove(registered, type(module).__name__, own, rotation, every)
        known.add(kind)


def _prove(
    registered: Registered,
    title: str,
    own: Rotation,
    rotation: Rotation,
    every: Iterable[Sequence[torch.Tensor]],
) -> None:
    compared = 0
    for given in every:
        due, exact = own_pair(own, given), own_pair(own, [one.double() for one in given])
        if due is None or exact is None or due[0].dtype != given[0].dtype:
            continue  # this family turns whole heads alone, or takes no wider angles
        compared += 1
        lent = [one.clone() for one in given]
        with guarded(registered, f"its rotation in {title}"):
            found = rotation(*lent)
        if any(not torch.equal(*pair) for pair in zip(lent, given, strict=True)):
            raise ExecutionError(f"{registered} writes into what it rotates for {title}")
        for new, one, right in zip(_pair(registered, found), due, exact, strict=True):
            _hold(registered, title, new, one, right)
    if not compared:
        raise ExecutionError(f"{registered} fits {title}, {TURNS_NO_PAIR}")


def _given(
    module: nn.Module, dtype: torch.dtype, device: torch.device, every: Iterable[tuple[int, int]]
) -> Iterator[list[torch.Tensor]]:
    """Queries, keys, cosines and sines, as layers hand them on.

    All of a head is turned, or half of it, which a layer may also have cut out before. Where
    nobody says positions, all texts share the angles of one. Some families' are in float32.
    """
    draw = torch.Generator().manual_seed(0)
    heads, kv_heads, whole = heads_of(module)
    for size, turned in ((whole, whole), (whole, whole // 2), (whole // 2, whole // 2)):
        for (texts, tokens), shared in ((t, s) for t in every for s in {1, t[0]}):
            q, k = (
                torch.randn(texts, tokens, n, size, generator=draw, device="cpu").transpose(1, 2)
                for n in (heads, kv_heads)
            )
            half = torch.randn(shared, tokens, turned // 2, generator=draw, device="cpu")
            angles = 10 * half.repeat(1, 1, 2)
            cos, sin = angles.cos(), angles.sin()
            for wide in dict.fromkeys((dtype, torch.float32)):
                kinds = (dtype, dtype, wide, wide)
                yield [t.to(device, d) for t, d in zip((q, k, cos, sin), kinds, strict=True)]


def heads_of(module: Any) -> tuple[int, int, int]:
    """How many heads of queries and of keys there are, and their size; some, where none says."""
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None) or 4
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return heads, kv_heads, size if isinstance(size, int) else 64


def own_pair(function: Rotation, given: Sequence[torch.Tensor]) -> Tensors | None:
    """What the layer's own function makes of it; None where it takes or returns something else."""
    try:
        q, k = function(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - whoever wrote the model decides what it raises
        return None
    return q, k


def _pair(registered: Registered, found: Any) -> Tensors:
    if (
        not isinstance(found, tuple | list)
        or len(found) != 2
        or not all(isinstance(one, torch.Tensor) for one in found)
    ):
        raise fault(registered, f"its rotation must return two tensors, got {quoted(found)}")
    return tuple(found)


def _hold(
    registered: Registered, title: str, new: torch.Tensor, own: torch.Tensor, exact: torch.Tensor
) -> None:
    if (new.shape, new.dtype, new.device) != (own.shape, own.dtype, own.device):
        raise ExecutionError(
            f"{registered} gives {new.dtype} {list(new.shape)} for a rotation of {title}, and "
            f"{own.dtype} {list(own.shape)} is due"
        )
    rounding = _ROUNDINGS * torch.finfo(own.dtype).eps * exact.abs().max()
    off, allowed = (new.double() - exact).abs().max(), rounding + 2 * (own - exact).abs().max()
    if not off <= allowed:
        raise ExecutionError(
            f"{registered} does not rotate as {title} does: it is off by {off:.3g}, where "
            f"{allowed:.3g} is due to rounding; `jackfield check plugin:{registered.backend.name} "
            "--kind kernel` shows with what"
        )
