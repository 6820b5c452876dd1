"""What a quantizer or a kernel offers as functions in C is held to its Python functions, before a
step runs one.

A call is proven when it is laid out: for every weight, and for every shape of what is multiplied
with one. Random numbers go into the step's own tensors, so what reads or writes elsewhere is found
as well; what lay in them is put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from jackfield.bridge.native_calls import operator_of, run, run_together
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
    """What a call was asked for."""

    out: torch.Tensor
    args: Sequence[Any]
    named: Mapping[str, Any]


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
        if not isinstance(call, NativeCall):
            raise self._fault(f"must return a NativeCall or None, got {quoted(call)}")
        if type(call.function) is not int or call.function == 0:
            raise self._fault(f"has {quoted(call.function)} for the address of a function")
        if not isinstance(call.arguments, bytes):
            raise self._fault(f"has {quoted(call.arguments)} for arguments, which are bytes")
        tensors = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        weights = tuple(one.data_ptr() for one in tensors if self._owned.has(one))
        shapes = tuple((one.shape, one.stride(), one.dtype) for one in (out, *tensors))
        if weights not in self._weights or shapes not in self._shapes:
            self._prove(call, out, args, named)
            self._weights.add(weights)
            self._shapes.add(shapes)
        return call

    def _prove(
        self, call: NativeCall, out: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        given = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        given = [one for one in given if not self._owned.has(one)]  # what a step computes
        with torch.inference_mode():
            before = [one.clone() for one in given]
            draw = torch.Generator().manual_seed(0)
            for one in given:
                if one.is_floating_point():
                    one.copy_(torch.randn(one.shape, generator=draw))
                else:
                    one.zero_()  # an index that is in every table
            lent = [one.clone() for one in given]
            try:
                self._hold(call, out, args, named)
                if call.together:
                    self._hold_siblings(_Asked(out, args, named))
                if not all(map(torch.equal, given, lent)):
                    raise self._fault(f"changes what it is given{_of(out)}")
            finally:
                for one, old in zip(given, before, strict=True):
                    one.copy_(old)

    def _hold(
        self, call: NativeCall, out: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        due = self._operator(*args, **named)
        if not isinstance(due, torch.Tensor) or due.shape != out.shape or due.dtype != out.dtype:
            raise self._fault(f"is of an operator that returns no tensor as was planned{_of(out)}")
        nothing = float("nan") if out.is_floating_point() else 1
        out.fill_(nothing)
        if not run(call):
            raise self._fault(
                f"says that it cannot compute{_of(out)}; where it cannot, offer None and not a call"
            )
        self._compare(out, due, args)

    def _hold_siblings(self, asked: _Asked) -> None:
        """Calls with one input may run as one: this and those before, into outputs of their own."""
        before = self._siblings[:1]
        if not (before and before[0].args[0] is asked.args[0] and len(self._siblings) < _SIBLINGS):
            self._siblings = []
        self._siblings.append(asked)
        if len(self._siblings) < 2:
            return
        outs = [torch.full_like(one.out, float("nan")) for one in self._siblings]
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
        for out, one in zip(outs, self._siblings, strict=True):
            self._compare(out, self._operator(*one.args, **one.named), one.args, "of several ")

    def _compare(
        self, out: torch.Tensor, due: torch.Tensor, args: Sequence[Any], which: str = ""
    ) -> None:
        if not out.is_floating_point():
            if not torch.equal(out, due):
                raise self._fault(f"writes other numbers than the Python function{_of(out)}")
            return
        found, right = out.double(), due.double()
        if unwritten := int(found.isnan().logical_and_(~right.isnan()).sum()):
            raise self._fault(f"leaves {unwritten} of {found.numel()} numbers unwritten{_of(out)}")
        first = next((one for one in args if isinstance(one, torch.Tensor)), out)
        length = first.shape[-1] if first.dim() else 1
        bound = _ROUNDINGS * torch.finfo(out.dtype).eps + _IN_A_SUM * length**0.5
        most, off = float(right.abs().max()), float((found - right).abs().max())
        if not off <= bound * most:
            raise self._fault(
                f"writes numbers {which}that are {off:.2g} off those of the Python function, of up "
                f"to {most:.2g}{_of(out)}"
            )

    def _fault(self, what: str) -> Exception:
        return fault(self._whose, f"the native operator of {self._name} {what}")


def _of(out: torch.Tensor) -> str:
    return f" ({list(out.shape)} in {str(out.dtype).removeprefix('torch.')})"
