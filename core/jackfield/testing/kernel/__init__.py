"""Checks of kernels: what takes a layer's place, against the layer, and in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jackfield.errors import JackfieldError
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.kernel import numbers, rotary, traced, whole
from jackfield.testing.kernel.keeping import inplace, repeated, together
from jackfield.testing.kernel.layers import (
    WHERE,
    Layer,
    agree,
    capabilities_of,
    fitting,
    layers,
    variants,
)
from jackfield.testing.kernel.turning import rotates
from jackfield.testing.subject import Subject

WHOLE = 6  # classes of layers of which all is checked; of others a few rows


def checks(subject: Subject) -> Iterator[Check]:
    """For each class of layers that it fits: rows, shapes, strides, dtypes, extreme values."""
    yield Check("fits", "fits: with weights as before", lambda _: agree(subject))
    try:
        found = fitting(subject)
    except (WrongError, JackfieldError):  # the check above tells it
        return
    if not found:
        yield Check("layers", "layers that it replaces", _fits_nothing)
    if found and rotates(subject, *next(iter(found.items()))):
        yield from rotary.checks(subject, found)
    else:
        yield from _of_layers(subject, found)
    yield from whole.checks(subject, dict(list(found.items())[:WHOLE]))


def _of_layers(subject: Subject, found: dict[str, str]) -> Iterator[Check]:
    for title, model in list(found.items())[:WHOLE]:
        yield from _of_a_class(subject, title, model)
    for title, model in list(found.items())[WHOLE:]:
        calls = _Calls(subject, title, model)
        yield Check(f"{title}.rows", f"{title}: rows", calls, cases=numbers.ROWS[0][:3])
        yield Check(f"{title}.config", f"{title}: the config", _Configs(subject, title, model))


def _fits_nothing(_: object) -> None:
    raise NotTriedError(
        f"it fits no layer of the kit's {len(WHERE)} models: nothing that it computes was compared"
    )


class _Calls:
    """Runs inputs through one layer after the other."""

    def __init__(self, subject: Subject, title: str, model: str, **how: Any) -> None:
        self._subject, self._which, self._how = subject, (title, model), how
        self._layer: Layer | None = None
        self._worst = 0.0

    def __call__(self, rows: numbers.Rows) -> str:
        if self._layer is None:
            self._layer = layers(self._subject, *self._which, **self._how)[0]
        given = rows.made(self._layer, self._subject.seed)
        self._worst = max(self._worst, numbers.held(self._layer, given))
        return f"at most {self._worst:.0%} of what rounding may be"


class _Configs:
    """Models whose configs say another activation, biases, another epsilon."""

    def __init__(self, subject: Subject, title: str, model: str) -> None:
        self._subject, self._which = subject, (title, model)

    def __call__(self, _: object) -> str:
        told = []
        for changes in variants(*self._which):
            what = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            try:
                found = layers(self._subject, *self._which, **changes)
            except NotTriedError:  # it refuses such a model
                found = []
            for layer in found[:1]:
                given = numbers.Rows((3,)).made(layer, self._subject.seed)
                try:
                    numbers.held(layer, given)
                except WrongError as error:
                    raise WrongError(f"in a model with {what}: {error}") from None
            told.append(what if found else f"{what}: not fitted")
        if not told:
            raise NotTriedError("no field of a config that the kit knows changes such layers")
        return "; ".join(told)


def _of_a_class(subject: Subject, title: str, model: str) -> Iterator[Check]:
    can = capabilities_of(subject)
    calls = partial(_Calls, subject, title, model)
    flat, deep = numbers.ROWS
    yield Check(f"{title}.rows", f"{title}: rows", calls(), cases=flat)
    yield Check(f"{title}.batches", f"{title}: rows of a batch", calls(), cases=deep)
    many = calls(hidden_size=8)
    yield Check(f"{title}.many_rows", f"{title}: rows", many, cases=numbers.MANY, large=True)
    yield Check(f"{title}.config", f"{title}: the config", _Configs(subject, title, model))
    for size in (8, 48, 260):
        own = calls(hidden_size=size)
        yield Check(f"{title}.size.{size}", f"{title}: any size", own, cases=flat[:3])
    lying = list(numbers.strided())
    yield Check(f"{title}.strided", f"{title}: strided inputs", calls(), cases=lying)
    for dtype in sorted(can.dtypes):
        cases = [*flat[:3], *numbers.extreme(getattr(torch, dtype))]
        yield Check(
            f"{title}.dtype.{dtype}", f"dtypes: {dtype}, {title}", calls(dtype=dtype), cases=cases
        )

    def every(run: Any, **how: Any) -> Any:
        return lambda _: run(layers(subject, title, model, **how), subject.seed)

    yield Check(f"{title}.repeated", f"{title}: calls one after the other", every(repeated))
    if can.traceable:
        for dtype in sorted(can.dtypes):
            yield Check(
                f"{title}.traced.{dtype}", f"traceable, {dtype}, {title}",
                every(partial(traced.checked, subject), dtype=dtype),
            )  # fmt: skip
    for dtype in sorted(can.dtypes):
        yield Check(
            f"{title}.parameters.{dtype}", f"{title}: the layer's own parameters, {dtype}",
            every(inplace, dtype=dtype),
        )  # fmt: skip
    if can.batch_invariant:
        for dtype in sorted(can.dtypes):
            yield Check(
                f"{title}.batch_invariant.{dtype}", f"batch_invariant, {dtype}, {title}",
                every(together, dtype=dtype),
            )  # fmt: skip
