"""What the kit does to native calls: their arguments change, and two threads run them at once."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jackfield.contracts import NativeCall
from jackfield.testing.checks import WrongError
from jackfield.testing.native import keeps_nothing, runs_beside_itself

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
X, SCALE = torch.arange(12.0).view(3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def right(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    out.copy_(x * scale)


def by_one_room() -> Write:
    """What lies between input and output has one place, whoever calls."""
    room = torch.empty_like(X)

    def write(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
        room.copy_(x)
        time.sleep(1e-4)  # as C code, it gives the interpreter to others
        out.copy_(room * scale)

    return write


def calling(write: Write, taken: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> Any:
    """A native operator of what `write` does, on what is `taken` of its arguments."""
    made: list[tuple[Any, ...]] = []

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    def call(arguments: int) -> bool:
        write(*made[ctypes.c_int64.from_address(arguments).value])
        return True

    address = ctypes.cast(call, ctypes.c_void_p).value or 0

    def native(out: torch.Tensor, *arguments: torch.Tensor) -> NativeCall:
        made.append((out, *map(taken, arguments)))
        return NativeCall(address, struct.pack("@q", len(made) - 1), (call,))

    return native


def tried(check: Any, native: Any) -> None:
    with torch.inference_mode():
        check("it", native, scaled, (X.clone(), SCALE.clone()), {})


@pytest.mark.parametrize("check", [keeps_nothing, runs_beside_itself])
def test_a_right_one_passes(check: Any) -> None:
    tried(check, calling(right))


@pytest.mark.parametrize("size", [12, 4])
def test_a_copy_of_an_argument_is_seen(size: int) -> None:
    copying = calling(right, lambda t: t.clone() if t.numel() == size else t)
    with pytest.raises(WrongError, match="whose arguments have changed since it was made"):
        tried(keeps_nothing, copying)


def test_arguments_are_as_they_were() -> None:
    x, scale = X.clone(), SCALE.clone()
    keeps_nothing("it", calling(right), scaled, (x, scale), {})
    assert torch.equal(x, X)
    assert torch.equal(scale, SCALE)


def test_memory_that_calls_share_is_seen() -> None:
    with pytest.raises(WrongError, match="while another thread runs one"):
        tried(runs_beside_itself, calling(by_one_room()))
