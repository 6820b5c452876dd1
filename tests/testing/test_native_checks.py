"""Native calls that lie are found beside the Python function that they stand for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jackfield.contracts import NativeCall
from jackfield.testing.checks import WrongError
from jackfield.testing.native import Heard, agrees

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
DUE = torch.arange(12.0).reshape(3, 4).bfloat16()


def native(act: Callable[[torch.Tensor], bool]) -> Callable[..., NativeCall]:
    """A C function that does `act` on its output; in Python, for these tests."""

    def made(out: torch.Tensor) -> NativeCall:
        function = FUNCTION(lambda _: act(out))
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return NativeCall(address, b"12345678", (function,))

    return made


def writes(numbers: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    return lambda out: bool(out.copy_(numbers).numel())


def adds(out: torch.Tensor) -> bool:
    """Right the first time: what was there is nobody's, and then it is the last step's."""
    out.copy_(torch.where(out.isnan(), DUE, out + DUE))
    return True


def skips_the_end(out: torch.Tensor) -> bool:
    out[:2].copy_(DUE[:2])
    return True


def test_one_that_is_right() -> None:
    assert agrees("op", native(writes(DUE)), DUE)
    assert agrees("op", native(writes(DUE * (1 + 2**-8))), DUE)  # one rounding
    assert not agrees("op", lambda out: None, DUE)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (writes(DUE * 1.1), "off those of the Python function"),
        (writes(DUE.flip(0)), "off those of the Python function"),
        (lambda out: True, "nan off"),
        (skips_the_end, "nan off"),
        (adds, "run again writes numbers"),
        (lambda out: False, "says that it cannot be done"),
    ],
    ids=["scaled", "rows", "nothing", "end", "adds", "refuses"],
)
def test_one_that_is_wrong(act: Callable[[torch.Tensor], bool], said: str) -> None:
    with pytest.raises(WrongError, match=said):
        agrees("op", native(act), DUE)


TOGETHER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)


@pytest.mark.parametrize(
    ("some", "said"),
    [
        (lambda outs: outs, None),
        (lambda outs: outs[:-1], "run together with others, writes numbers that are nan off"),
        (lambda outs: None, "cannot be done together"),
    ],
    ids=["right", "the last is left out", "refuses"],
)
def test_calls_that_run_together(some: Any, said: str | None) -> None:
    outs: list[torch.Tensor] = []

    def together(_: int, count: int) -> bool:
        assert count == len(outs) - 1  # the first ran alone
        return some([out.copy_(DUE) for out in some(outs[1:]) or []]) is not None

    held = TOGETHER(together)

    def made(out: torch.Tensor) -> NativeCall:
        outs.append(out)
        alone = native(writes(DUE))(out)
        return alone._replace(together=ctypes.cast(held, ctypes.c_void_p).value or 0)

    if said is None:
        assert agrees("op", made, DUE)
    else:
        with pytest.raises(WrongError, match=said):
            agrees("op", made, DUE)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_one_that_says_by_row_is_asked_for_one_row(by_row: bool, right: bool) -> None:
    x = torch.arange(12.0).view(1, 4, 3) + 1
    due = x * 2 if right else x / x.max()  # the scale of all rows

    def made(out: torch.Tensor, given: torch.Tensor) -> NativeCall:
        written = given * 2 if right else given / given.max() + 0.5 * (given.shape[1] == 1)
        return native(writes(written))(out)._replace(by_row=by_row)

    if right or not by_row:
        assert agrees("op", made, due, x)
    else:
        with pytest.raises(WrongError, match="says by_row, asked for one row"):
            agrees("op", made, due, x)


def test_what_is_no_call() -> None:
    def no_call(out: torch.Tensor) -> Any:
        return 7

    with pytest.raises(WrongError, match="must return a NativeCall or None, got int"):
        agrees("op", no_call, DUE)


def test_operators_are_heard_where_a_compiler_reads() -> None:
    with Heard({"aten.add.Tensor"}) as heard:
        assert torch.compiler.is_compiling()
        found = torch.ones(2) + 1
        torch.ones(2) * 3
    assert not torch.compiler.is_compiling()
    ((name, _, _, due),) = heard.calls
    assert name == "aten.add.Tensor"
    assert due is found
