"""Functions in C that somebody offers: found by their operator, looked at, run as a compiler runs
them, and held to what is due.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from jackfield.contracts import NativeCall
from jackfield.errors import quoted

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_TOGETHER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)


def operator_of(name: str) -> Any:
    """torch's operator of this name, "library.operator.overload".

    Raises AttributeError where torch has none, ValueError where that is no such name.
    """
    space, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload)


def flaw_of(call: Any, room: int | None = None) -> str | None:
    """What keeps `call`, which somebody returned, from being run. `room`: bytes of arguments."""
    if not isinstance(call, NativeCall):
        return f"must return a NativeCall or None, got {quoted(call)}"
    for address in (call.function, call.together or 1):
        if type(address) is not int or address <= 0:
            return f"has {quoted(address)} for the address of a function"
    if not isinstance(call.arguments, bytes):
        return f"has {quoted(call.arguments)} for arguments, which are bytes"
    if room is not None and len(call.arguments) > room:
        return f"has {len(call.arguments):,} bytes of arguments, {room:,} at most"
    return None


def unlike(due: torch.Tensor) -> torch.Tensor:
    """A tensor like `due`, with none of its numbers: what it keeps of them a call did not write."""
    if due.is_floating_point() or due.is_complex():
        wide = due.to(torch.complex128 if due.is_complex() else torch.float64)
        wrong = torch.where(wide.isnan(), torch.ones_like(wide), float("nan")).to(due.dtype)
    else:
        wrong = due.bitwise_not()
    repeats = any(step == 0 < size - 1 for size, step in zip(due.shape, due.stride(), strict=True))
    strides = wrong.stride() if repeats else due.stride()
    return torch.empty_strided(due.shape, strides, dtype=due.dtype).copy_(wrong)


def difference(
    found: torch.Tensor, due: torch.Tensor, relative: float, least: float = 0.0
) -> str | None:
    """What a call does that wrote `found` where its Python function gives `due`; None: the same.

    Floats may be `relative` of the largest finite one that is due off, or of `least`.
    """
    if not (due.is_floating_point() or due.is_complex()):
        off = int((found != due).sum())
        if not off:
            return None
        return f"writes other numbers than the Python function in {off} of {due.numel()} places"
    found, due = _as_double(found), _as_double(due)
    if unwritten := int((found.isnan() & ~due.isnan()).sum()):
        return f"leaves {unwritten} of {due.numel()} numbers unwritten"
    odd = ~due.isfinite()
    if ((found != due) & odd & ~(found.isnan() & due.isnan())).any():
        return "writes other numbers where the Python function has infinity or NaN"
    found, due = found[~odd], due[~odd]
    if not due.numel():
        return None
    far, most = float((found - due).abs().max()), float(due.abs().max())
    if far <= relative * max(most, least):
        return None
    of = f"those of the Python function, of up to {most:.2g}"
    return f"writes numbers that are {far:.2g} off {of}"


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers; of complex ones both parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    return tensor.double()


def run(call: NativeCall) -> bool:
    """Call it once, with its arguments at a place of their own."""
    held = ctypes.create_string_buffer(call.arguments, len(call.arguments))
    return bool(_FUNCTION(call.function)(ctypes.addressof(held)))


def run_together(calls: Sequence[NativeCall]) -> bool:
    """Call the `together` of the first once, for all of them."""
    held = [ctypes.create_string_buffer(call.arguments, len(call.arguments)) for call in calls]
    where = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    return bool(_TOGETHER(calls[0].together)(ctypes.addressof(where), len(held)))
