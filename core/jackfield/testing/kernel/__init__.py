"""Checks of kernels: what takes a layer's place, against the layer, and in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from jackfield.errors import JackfieldError
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.kernel import numbers, whole
from jackfield.testing.kernel.keeping import inplace, repeated, together
from jackfield.testing.kernel.layers import (
    Layer,
    agree,
    capabilities_of,
    fitting,
    layers,
)
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """For each class of layers that it fits: rows, shapes, strides, dtypes, extreme values."""
    yield Check("fits", "fits: with weights as before", lambda _: agree(subject))
    try:
        found = fitting(subject)
    except (WrongError, JackfieldError):  # the check above tells it
        found = {}
    if not found:
        yield Check("layers", "layers that it replaces", _fits_nothing)
    for title, model in found.items():
        yield from _of_a_class(subject, title, model)
    yield from whole.checks(subject, found)


def _fits_nothing(_: object) -> None:
    raise NotTriedError("it fits no layer of the kit's models, which are of transformers' families")


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


def _of_a_class(subject: Subject, title: str, model: str) -> Iterator[Check]:
    can = capabilities_of(subject)
    calls = partial(_Calls, subject, title, model)
    flat, deep = numbers.ROWS
    yield Check(f"{title}.rows", f"{title}: rows", calls(), cases=flat)
    yield Check(f"{title}.batches", f"{title}: rows of a batch", calls(), cases=deep)
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
    yield Check(f"{title}.parameters", f"{title}: the layer's own parameters", every(inplace))
    if can.batch_invariant:
        for dtype in sorted(can.dtypes):
            yield Check(
                f"{title}.batch_invariant.{dtype}", f"batch_invariant, {dtype}, {title}",
                every(together, dtype=dtype),
            )  # fmt: skip
