"""Functions in C that somebody offers: found by their operator, and run as a compiler runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from jackfield.contracts import NativeCall

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_TOGETHER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)


def operator_of(name: str) -> Any:
    """torch's operator of this name, "library.operator.overload".

    Raises AttributeError where torch has none, ValueError where that is no such name.
    """
    space, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload)


def run(call: NativeCall) -> bool:
    """Call it once, with its arguments at a place of their own."""
    held = ctypes.create_string_buffer(call.arguments, len(call.arguments))
    return bool(_FUNCTION(call.function)(ctypes.addressof(held)))


def run_together(calls: Sequence[NativeCall]) -> bool:
    """Call the `together` of the first once, for all of them."""
    held = [ctypes.create_string_buffer(call.arguments, len(call.arguments)) for call in calls]
    where = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    return bool(_TOGETHER(calls[0].together)(ctypes.addressof(where), len(held)))
