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
    return lambda out: out.copy_(numbers) is out


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
        (lambda out: True, "leaves 12 of 12 numbers unwritten"),
        (skips_the_end, "leaves 4 of 12 numbers unwritten"),
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
        (lambda outs: outs[:-1], "run together with others, leaves 12 of 12 numbers unwritten"),
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

    with pytest.raises(WrongError, match="must return a NativeCall or None, got 7"):
        agrees("op", no_call, DUE)


@pytest.mark.parametrize("due", [torch.arange(6), torch.arange(6) % 2 == 0, torch.zeros(0)])
def test_whole_numbers_and_none(due: torch.Tensor) -> None:
    assert agrees("op", native(writes(due)), due)
    if due.numel():
        with pytest.raises(WrongError, match="other numbers than the Python function in 1 of 6"):
            agrees("op", native(writes(torch.cat([due[:5], ~due[5:]]))), due)
        with pytest.raises(WrongError, match="in 6 of 6 places"):
            agrees("op", native(lambda out: True), due)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.float64])
def test_a_call_that_writes_nothing_is_caught_whatever_is_due(dtype: torch.dtype) -> None:
    due = torch.tensor([1.0, float("nan"), -2.0]).to(dtype)
    assert agrees("op", native(writes(due)), due)
    for one in (due, torch.full((3,), float("nan")).to(dtype)):
        with pytest.raises(WrongError, match=r"unwritten|infinity or NaN"):
            agrees("op", native(lambda out: True), one)


def test_an_output_that_repeats_a_number() -> None:
    due = torch.tensor([[2.0], [3.0]]).expand(2, 4)
    assert agrees("op", native(writes(due)), due)


def test_infinity_and_nan_are_numbers_too() -> None:
    due = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), -2.0])
    assert agrees("op", native(writes(due)), due)
    for at, other in ((1, 3e38), (2, float("inf")), (3, 0.0), (4, float("inf"))):
        wrong = due.clone()
        wrong[at] = other
        with pytest.raises(WrongError, match=r"infinity or NaN|that are inf off"):
            agrees("op", native(writes(wrong)), due)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": 0}, "has 0 for the address of a function"),
        ({"function": -5}, "has -5 for the address of a function"),
        ({"function": None}, "has None for the address of a function"),
        ({"together": 2.5}, "has 2.5 for the address of a function"),
        ({"arguments": "text"}, "has 'text' for arguments, which are bytes"),
        ({"arguments": bytes(1025)}, "has 1,025 bytes of arguments, 1,024 at most"),
    ],
)
def test_calls_that_would_end_the_process_are_not_run(given: dict[str, Any], said: str) -> None:
    made = native(writes(DUE))
    with pytest.raises(WrongError, match=f"^op {said}$"):
        agrees("op", lambda out: made(out)._replace(**given), DUE, room=1024)


def test_operators_are_heard_where_a_compiler_reads() -> None:
    with Heard({"aten.add.Tensor"}) as heard:
        assert torch.compiler.is_compiling()
        found = torch.ones(2) + 1
        torch.ones(2) * 3
    assert not torch.compiler.is_compiling()
    ((name, _, _, due),) = heard.calls
    assert name == "aten.add.Tensor"
    assert due is found
