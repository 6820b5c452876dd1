"""Checks of what a packed attention keeps: between layers, between steps, and between sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from jackfield.contracts import PackedLayer
from jackfield.testing.attention import steps
from jackfield.testing.attention.jobs import Job, Jobs, capabilities_of
from jackfield.testing.attention.judging import held
from jackfield.testing.attention.packed import Case, called, made
from jackfield.testing.attention.rows import Needs
from jackfield.testing.attention.steps import Packed
from jackfield.testing.attention.truth import Piece
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.models import WINDOW
from jackfield.testing.subject import Subject

_STEP = Packed(((3, 7), (1, 9), (2, 2)))
_DECODE = Packed(((1, 7), (1, 9), (1, 2)))


def checks(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    can = capabilities_of(subject)

    def check(name: str, what: str, run: Callable[[Subject, Jobs, Packed], None]) -> Check:
        def one(step: Packed) -> None:
            run(subject, jobs, step)

        return Check(f"packed.{name}", what, one, cases=(_DECODE, _STEP))

    yield check("layers", "contract: layers share page tables, and not keys", _layers)
    yield check("steps", "contract: nothing is kept from step to step", _steps)
    yield check("outputs", "contract: the output belongs to the model", _outputs)
    if "sliding_window" in can.features:
        yield check("two_windows", "features: sliding_window, beside layers without", _windows)
    if can.batch_invariant:
        for dtype in sorted(can.dtypes):
            yield Check(
                f"packed.batch_invariant.{dtype}",
                f"batch_invariant, {dtype}",
                partial(_alone, subject, jobs, dtype, Needs()),
                cases=_TOGETHER,
            )
        if "bidirectional_blocks" in can.features:
            yield Check(
                "packed.batch_invariant.bidirectional_blocks",
                "batch_invariant; features: bidirectional_blocks",
                partial(_alone, subject, jobs, "", Needs(block=3)),
                cases=_TOGETHER,
            )


def _judge(job: Job, pieces: list[Piece], case: Case, layer: PackedLayer, s: Subject) -> None:
    """Hold one call to the truth; other calls, which find out what is wrong, have layers anew."""
    first = [layer]

    def call(pieces: Seq[Piece]) -> list[torch.Tensor]:
        window = case.needs.window
        own = first.pop() if first else steps.layer_of(pieces, case.packed, window, s.seed)
        return called(job, pieces, case, own, s)

    held(pieces, call)


def _layers(subject: Subject, jobs: Jobs, step: Packed) -> None:
    """Several layers of one step: the same tables, other keys, queries and scales."""
    job = jobs.bound("plain", "packed")
    module: Any = job.module
    tables = steps.tables_of(step, steps.step_of(step, job.device), None, subject.seed)
    for number in range(4):
        case = Case(step, Needs(scaling=0.3 + 0.4 * number))
        pieces = made(job, case, subject.seed + number)
        module.layer_idx = number % 2
        layer = PackedLayer(*steps.pools_of(pieces, tables, steps.pages_of(step)), tables)
        try:
            _judge(job, pieces, case, layer, subject)
        except WrongError as error:
            raise WrongError(f"in layer {number} of one step: {error}") from None
    module.layer_idx = 0


def _steps(subject: Subject, jobs: Jobs, step: Packed) -> None:
    """Steps that look alike: the same numbers of tokens, in other pages, in pools made anew."""
    job, case = jobs.bound("plain", "packed"), Case(step, Needs())
    layer: PackedLayer | None = None
    for number in range(8):
        longer = tuple((q, tokens + number // 2) for q, tokens in step.sizes)
        own = replace(step, sizes=longer)
        case = Case(own, Needs())
        pieces = made(job, case, subject.seed + number)
        new = steps.layer_of(pieces, own, None, subject.seed + number)
        if layer is None:
            layer = new
        elif number % 3 == 0 or layer.keys.shape != new.keys.shape:
            layer.tables = new.tables
            layer.replace(new.keys, new.values)
        else:  # in the same memory
            layer.tables = new.tables
            layer.keys.copy_(new.keys)
            layer.values.copy_(new.values)
        del new
        try:
            _judge(job, pieces, case, layer, subject)
        except WrongError as error:
            raise WrongError(f"in step {number} of {8}: {error}") from None


def _outputs(subject: Subject, jobs: Jobs, step: Packed) -> None:
    job, case = jobs.bound("plain", "packed"), Case(step, Needs())
    kept = []
    for number in range(3):
        pieces = made(job, case, subject.seed + number)
        layer = steps.layer_of(pieces, step, None, subject.seed)
        found = called(job, pieces, case, layer, subject)
        kept.append((found, [one.clone() for one in found]))
    for found, before in kept:
        if not all(torch.equal(a, b) for a, b in zip(found, before, strict=True)):
            raise WrongError(
                "the output of a call changes in a later call: it is memory that is used again, "
                "and an output belongs to the model"
            )


def _windows(subject: Subject, jobs: Jobs, step: Packed) -> None:
    """A step of layers with a window and layers without, which have tables of their own."""
    job = jobs.bound("sliding_window", "packed")
    one = steps.step_of(step, job.device)
    by_window = {w: steps.tables_of(step, one, w, subject.seed + 1) for w in (None, WINDOW)}
    for number, window in enumerate((WINDOW, None, WINDOW, None)):
        case = Case(step, Needs(window=window), silent=number > 1)
        pieces, tables = made(job, case, subject.seed + number), by_window[window]
        layer = PackedLayer(*steps.pools_of(pieces, tables, steps.pages_of(step)), tables)
        try:
            _judge(job, pieces, case, layer, subject)
        except WrongError as error:
            which = "without a window" if window is None else f"with a window of {window}"
            raise WrongError(f"in a layer {which}, beside others in one step: {error}") from None


_TOGETHER = (
    Packed(((1, 5), (1, 9))),
    Packed(((3, 3), (1, 12), (5, 20))),
    Packed(((1, 70), (1, 3), (1, 33), (1, 140), (1, 64)), 16),
    Packed(((17, 40), (1, 90), (6, 6), (33, 33)), 16),
)


def _alone(subject: Subject, jobs: Jobs, dtype: str, needs: Needs, step: Packed) -> None:
    """A sequence by itself, in other pages, has the bits that it has among others."""
    job, case = jobs.bound("plain", "packed", dtype=dtype), Case(step, needs)
    pieces = made(job, case, subject.seed)
    together = called(job, pieces, case, steps.layer_of(pieces, step, None, 1), subject)
    backwards = replace(step, sizes=step.sizes[::-1], in_a_row=True)
    turned = called(
        job, pieces[::-1], Case(backwards, needs),
        steps.layer_of(pieces[::-1], backwards, None, 2), subject,
    )[::-1]  # fmt: skip
    for row, piece in enumerate(pieces):
        own = replace(step, sizes=step.sizes[row : row + 1])
        alone = called(
            job, [piece], Case(own, needs), steps.layer_of([piece], own, None, 3), subject
        )
        for found, how in ((alone[0], "alone"), (turned[row], "among them in another order")):
            if not torch.equal(found, together[row]):
                off = float((found.double() - together[row].double()).abs().max())
                raise WrongError(
                    f"sequence {row} of {len(pieces)} has other bits {how} than with the others "
                    f"({off:.2g} off), and batch_invariant is declared"
                )
