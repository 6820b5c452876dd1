"""Native calls that a backend offers, run as a compiler runs them, beside its Python functions."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.bridge.native_calls import difference, flaw_of, run_together, unlike
from jackfield.bridge.native_calls import run as run_call
from jackfield.contracts import Native, NativeCall
from jackfield.testing.checks import WrongError
from jackfield.testing.threads import are_alone

#: Of the largest number, that two ways to compute one thing may differ by: in the dtype of the
#: output, and in that of the sums, which two ways add up in another order.
_ROUNDINGS, _IN_SUMS = 8, 64


def agrees(
    what: str,
    native: Native,
    due: torch.Tensor,
    *arguments: Any,
    room: int | None = None,
    **given: Any,
) -> bool:
    """Hold what `native` offers for these arguments to `due`. Whether it offers anything.

    `native` gets an output that is full of numbers that nobody computed. Raises WrongError.
    """
    out = unlike(due)
    call = native(out, *arguments, **given)
    if call is None:
        return False
    if flaw := flaw_of(call, room):
        raise WrongError(f"{what} {flaw}")
    for again in range(2):  # a step runs it any number of times
        repeats(f"{what}{', run again' if again else ''}", call, out, due)
    if call.by_row and arguments[0].dim() == 3:
        _by_row(what, native, due, *arguments, **given)
    if call.together:
        others = [unlike(due) for _ in range(3)]
        calls = [native(other, *arguments, **given) for other in others]
        if not run_together([one for one in calls if one is not None]):
            raise WrongError(f"calls of {what} say that they cannot be done together")
        for other in others:
            _compare(f"{what}, run together with others,", other, due)
    return True


def keeps_nothing(
    what: str, native: Native, run: Any, arguments: Sequence[Any], given: dict[str, Any]
) -> None:
    """Hold a call to the operator `run` once its arguments have other numbers than when it was
    made: a step's inputs are written anew, and weights may be. Raises WrongError.
    """
    out = torch.empty_like(run(*arguments, **given))
    call = native(out, *arguments, **given)
    if call is None:
        return
    read = {id(t): t for t in (*arguments, *given.values()) if isinstance(t, torch.Tensor)}
    changed = [t for t in read.values() if t.is_floating_point() and t.is_contiguous()]
    before = [t.clone() for t in changed]
    try:
        for at, tensor in enumerate(changed):
            tensor.data.copy_(tensor.flip(-1) * (0.5 + at))
            due = run(*arguments, **given)
            repeats(f"{what}, whose arguments have changed since it was made,", call, out, due)
    finally:
        for tensor, old in zip(changed, before, strict=True):
            tensor.data.copy_(old)


def runs_beside_itself(
    what: str, native: Native, run: Any, arguments: Sequence[Any], given: dict[str, Any]
) -> None:
    """Run calls with two inputs from two threads at once, as two engines do. Raises WrongError."""
    first, *rest = arguments
    made = []
    for shift in range(2):
        out = torch.empty_like(run(*arguments, **given))
        call = native(out, first.roll(shift, -1), *rest, **given)
        if call is None:
            return
        made.append((call, out))

    def running(call: NativeCall, out: torch.Tensor) -> torch.Tensor:
        if not run_call(call):
            raise WrongError(f"the call of {what} says that it cannot be done")
        return out

    if not are_alone([partial(running, *one) for one in made]):
        raise WrongError(
            f"a call of {what} writes other numbers while another thread runs one of other inputs: "
            "they share memory that each of them needs for itself"
        )


def agree_together(
    what: str, native: Native, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], run: Any
) -> int:
    """Hold calls of several layers with one input, run together, to the operator `run`; how many.

    Raises WrongError.
    """
    made = []
    for (_, *rest), given in calls:
        first = calls[0][0][0]
        due = run(first, *rest, **given)
        out = unlike(due)
        call = native(out, first, *rest, **given)
        if call is not None and call.together:
            made.append((call, out, due))
    if not made:
        return 0
    if not run_together([call for call, *_ in made]):
        raise WrongError(
            f"calls of {what} for several layers say that they cannot be done together"
        )
    for _, out, due in made:
        _compare(f"{what}, run together with those of other layers,", out, due)
    return len(made)


def _by_row(what: str, native: Native, due: torch.Tensor, *arguments: Any, **given: Any) -> None:
    """The last row of each text, made alone."""
    first, *rest = arguments
    out = unlike(due[:, -1:].contiguous())
    call = native(out, first[:, -1:].contiguous(), *rest, **given)
    if call is not None:
        repeats(f"{what}, which says by_row, asked for one row,", call, out, due[:, -1:])


def repeats(what: str, call: NativeCall, out: torch.Tensor, due: torch.Tensor) -> None:
    """Hold `call`, which writes `out`, to `due`. Raises WrongError."""
    if not run_call(call):
        raise WrongError(f"the call of {what} says that it cannot be done")
    _compare(what, out, due)


class Heard(TorchDispatchMode):
    """While it is open, calls of the operators `names` are noted, with what they returned.

    Layers are told that a compiler reads them: many call their operators only then.
    """

    def __init__(self, names: Container[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], torch.Tensor]] = []
        self.others: set[str] = set()  # operators of no library of torch's

    def __enter__(self) -> Self:
        torch.compiler._is_compiling_flag = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.compiler._is_compiling_flag = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func) in self._names:
            self.calls.append((str(func), args, kwargs or {}, found))
        elif func.namespace not in ("aten", "prim", "prims"):
            self.others.add(str(func))
        return found


def _compare(what: str, found: torch.Tensor, due: torch.Tensor) -> None:
    bound = 0.0
    if due.is_floating_point() or due.is_complex():
        double = due.dtype in (torch.float64, torch.complex128)
        sums = torch.float64 if double else torch.float32
        bound = _ROUNDINGS * torch.finfo(due.dtype).eps + _IN_SUMS * torch.finfo(sums).eps
    if flaw := difference(found, due, bound, least=1.0):
        raise WrongError(f"{what} {flaw}")
