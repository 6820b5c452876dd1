"""What a quantizer or a kernel offers as functions in C is held to its Python functions, before a
step runs one.

A call is proven when it is laid out: for every weight, and for every shape of what is multiplied
with one. Random numbers, and whole ones of 0 and 1, go into the step's own tensors, so what reads
or writes elsewhere is found as well; what lay in them is put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from jackfield.bridge.native_calls import (
    difference,
    flaw_of,
    operator_of,
    run,
    run_together,
    unlike,
)
from jackfield.contracts import Native, NativeCall, NativeOperators
from jackfield.errors import quoted
from jackfield.guarded import fault, guarded
from jackfield.registry.backends import Registered

_ROUNDINGS = 4  # of the largest number, in the output's dtype
_SIBLINGS = 4  # calls that are tried as one
_REST = 0.5  # seconds
_IN_A_SUM = 4 * torch.finfo(torch.float32).eps  # by the root of how many are added


def held_offers(whose: Sequence[Registered], model: nn.Module) -> NativeOperators:
    """What a quantizer and kernels offer; who asks for a call gets PluginError where it is wrong.

    Raises PluginError where two offer one operator.
    """
    owned, found = _Owned(model), dict[str, _Held]()
    for registered in whose:
        with guarded(registered, "native_operators"):
            offered = registered.backend.native_operators()  # type: ignore[attr-defined]
        if not isinstance(offered, Mapping):
            raise fault(registered, f"native_operators must return a dict, got {quoted(offered)}")
        for name, native in offered.items():
            if name in found:
                raise fault(registered, f"offers {name}, and so does another backend of the plan")
            found[name] = _Held(registered, name, native, owned)
    return found


class _Owned:
    """Which memory is a model's own. Asked in bursts, while a step is laid out; between them
    weights may move, so all is looked at again after a rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: set[int] = set()
        self._others: set[int] = set()
        self._last = 0.0

    def has(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return True
        where = tensor.untyped_storage().data_ptr()
        if (now := time.monotonic()) - self._last > _REST:
            self._own, self._others = set(), set()
        self._last = now
        if where not in self._own and where not in self._others:
            weights = (*self._model.parameters(), *self._model.buffers())
            self._own = {one.untyped_storage().data_ptr() for one in weights}
            if where not in self._own:
                self._others.add(where)
        return where in self._own


class _Asked(NamedTuple):
    """What a call was asked for; `given` are the tensors that a step computes."""

    out: torch.Tensor
    args: Sequence[Any]
    named: Mapping[str, Any]
    given: Sequence[torch.Tensor]

    @property
    def input(self) -> torch.Tensor | None:
        return next(iter(self.given), None)


class _Held:
    """One operator: `native`, each of whose calls is proven once."""

    def __init__(self, whose: Registered, name: str, native: Native, owned: _Owned) -> None:
        self._whose, self._name, self._native = whose, name, native
        self._guard = guarded(whose, f"the native operator of {name}")
        self._operator = self._found(name)
        self._owned = owned
        self._siblings: list[_Asked] = []  # of the last input
        self._weights: set[tuple[int, ...]] = set()  # that were proven, by where they lie
        self._shapes: set[Any] = set()

    def _found(self, name: Any) -> Callable[..., Any]:
        try:
            found: Any = operator_of(name)
        except (AttributeError, ValueError):
            raise fault(
                self._whose,
                f"native_operators has {quoted(name)}, which is no operator of torch; a name is "
                "'library.operator.overload', as in 'mine.linear.default'",
            ) from None
        return found  # type: ignore[no-any-return]

    def __call__(self, out: torch.Tensor, *args: Any, **named: Any) -> NativeCall | None:
        with self._guard:
            call: Any = self._native(out, *args, **named)
        if call is None:
            return None
        if flaw := flaw_of(call):
            raise self._fault(flaw)
        tensors = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        weights = tuple(one.data_ptr() for one in tensors if self._owned.has(one))
        shapes = tuple((one.shape, one.stride(), one.dtype) for one in (out, *tensors))
        if weights not in self._weights or shapes not in self._shapes:
            with guarded(self._whose, f"the proof of {self._name}"):
                self._prove(call, out, args, named)
            self._weights.add(weights)
            self._shapes.add(shapes)
        return call  # type: ignore[no-any-return]

    def _prove(
        self, call: NativeCall, out: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        given = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        given = [one for one in given if not self._owned.has(one)]  # what a step computes
        memory = [_memory_of(one) for one in given]
        with torch.inference_mode():
            before = [one.clone() for one in memory]
            try:
                due = self._due(memory, out, args, named)
                lent = [one.clone() for one in given]
                self._hold(call, out, due, given)
                if call.together:
                    self._hold_siblings(_Asked(out, args, named, given))
                if not all(map(torch.equal, given, lent)):
                    raise self._fault(f"changes what it is given{_of(out)}")
            finally:
                for one, old in zip(memory, before, strict=True):
                    one.copy_(old)

    def _due(
        self,
        memory: Sequence[torch.Tensor],
        out: torch.Tensor,
        args: Sequence[Any],
        named: Mapping[str, Any],
    ) -> torch.Tensor:
        """What the Python function makes of random numbers, which are put in `memory`."""
        _fill(memory, most=1)
        try:
            due = self._operator(*args, **named)
        except Exception:  # noqa: BLE001 - 1 may lead out of a table, however that is told
            _fill(memory, most=0)
            with guarded(self._whose, f"the operator {self._name}"):
                due = self._operator(*args, **named)
        if not isinstance(due, torch.Tensor) or due.shape != out.shape or due.dtype != out.dtype:
            raise self._fault(f"is of an operator that returns no tensor as was planned{_of(out)}")
        return due

    def _hold(
        self, call: NativeCall, out: torch.Tensor, due: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> None:
        out.copy_(unlike(due))
        if not run(call):
            raise self._fault(
                f"says that it cannot compute{_of(out)}; where it cannot, offer None and not a call"
            )
        self._compare(out, due, given)

    def _hold_siblings(self, asked: _Asked) -> None:
        """Calls with one input may run as one: this and those before, into outputs of their own."""
        before = self._siblings[:1]
        if not (before and before[0].input is asked.input and len(self._siblings) < _SIBLINGS):
            self._siblings = []
        self._siblings.append(asked)
        if len(self._siblings) < 2:
            return
        dues = [self._operator(*one.args, **one.named) for one in self._siblings]
        outs = [
            torch.empty_strided(one.out.shape, one.out.stride(), dtype=due.dtype).copy_(unlike(due))
            for one, due in zip(self._siblings, dues, strict=True)
        ]
        with self._guard:
            calls = [
                self._native(out, *one.args, **one.named)
                for out, one in zip(outs, self._siblings, strict=True)
            ]
        joined = [call for call in calls if call is not None]
        if len(joined) < len(calls) or len({call.together for call in joined}) > 1:
            return
        if not run_together(joined):
            raise self._fault(f"says that it cannot compute several at once{_of(asked.out)}")
        for found, due, one in zip(outs, dues, self._siblings, strict=True):
            self._compare(found, due, one.given, ", run with others of its input,")

    def _compare(
        self, found: torch.Tensor, due: torch.Tensor, given: Sequence[torch.Tensor], how: str = ""
    ) -> None:
        first = next(iter(given), due)
        length = first.shape[-1] if first.dim() else 1
        inexact = due.is_floating_point() or due.is_complex()
        roundings = _ROUNDINGS * torch.finfo(due.dtype).eps if inexact else 0
        if flaw := difference(found, due, roundings + _IN_A_SUM * length**0.5):
            raise self._fault(f"{flaw}{_of(due)}", how)

    def _fault(self, what: str, how: str = "") -> Exception:
        return fault(self._whose, f"the native operator of {self._name}{how} {what}")


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """From its first number to its last: an expanded one has some of them several times."""
    far = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in far)
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _fill(memory: Sequence[torch.Tensor], most: int) -> None:
    """Random numbers; whole ones up to `most`."""
    draw = torch.Generator().manual_seed(0)
    for one in memory:
        if one.is_floating_point():
            one.copy_(torch.randn(one.shape, generator=draw))
        else:
            one.copy_(torch.randint(0, most + 1, one.shape, generator=draw))


def _of(out: torch.Tensor) -> str:
    return f" ({list(out.shape)} in {str(out.dtype).removeprefix('torch.')})"
