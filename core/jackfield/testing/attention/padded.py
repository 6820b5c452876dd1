"""Checks of `forward` and `mask`: the padded layout."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from jackfield.testing.attention import drawn, sizes
from jackfield.testing.attention.calls import LYING, called
from jackfield.testing.attention.jobs import Job, Jobs, capabilities_of, main_dtype
from jackfield.testing.attention.judging import held
from jackfield.testing.attention.rows import SITUATIONS, TITLES, Asked, Needs, Rows, asked
from jackfield.testing.attention.shapes import SHAPES, Shape
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.subject import Subject


@dataclass(frozen=True)
class Case:
    """Rows of a step, and what it needs."""

    rows: Rows
    needs: Needs
    lying: str = "dense"
    slid: bool = False

    def __str__(self) -> str:
        parts = [str(self.rows), *self.needs.shown()]
        if self.slid:
            parts.append("columns before the window gone")
        if self.lying != "dense":
            parts.append(f"keys lie {self.lying}")
        return ", ".join(parts)


def checks(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    """All that is checked of the padded layout, by direct calls."""
    declared = capabilities_of(subject).features
    for shape in SHAPES:
        if not shape.padded or not shape.declared(declared):
            continue
        for situation in SITUATIONS:
            if situation == "long" and shape.title not in ("plain", "sliding_window"):
                continue
            yield Check(
                f"padded.{situation}.{shape.title}",
                f"layouts: padded, {TITLES[situation]}"
                + (f"; features: {shape.feature}" if shape.feature else ""),
                _Situation(subject, jobs, shape),
                cases=list(_cases(shape, _rows(situation, subject), declared)),
                large=situation == "long",
            )
    yield from _numbers(subject, jobs)
    yield Check(
        "padded.repeated", "contract: nothing is kept from call to call",
        lambda _: _repeated(subject, jobs),
    )  # fmt: skip
    yield Check(
        "padded.gradients", "gradients, refused or right", lambda _: _gradients(subject, jobs)
    )


def _rows(situation: str, subject: Subject) -> Seq[Rows]:
    known = SITUATIONS[situation]
    return (*known, Rows(drawn.far(subject), 1)) if situation == "long" else known


def _cases(shape: Shape, steps: Seq[Rows], declared: frozenset[str]) -> Iterator[Case]:
    for number, rows in enumerate(steps):
        for needs in shape.needs(declared):
            yield Case(rows, needs, LYING[number % len(LYING)])
            if needs.window is not None and rows.past and not rows.unwritten:
                yield Case(rows, needs, slid=True)


class _Situation(sizes.Situation):
    """Of the padded layout."""

    def __call__(self, case: Case) -> str:
        # What a call says of its window is what the layer said when the attention was bound.
        job = self._jobs.bound(self._shape.model, "padded", **self._how, window=case.needs.window)
        if job.models_own and self._shape.feature == "position_bias":
            raise NotTriedError(
                "models with a position bias have their attention in their own code"
            )
        what = made(job, case, self._subject.seed)
        return self._worst.note(*judged(job, what, self._subject, case.lying))


def made(job: Job, case: Case, seed: int) -> Asked:
    """Random numbers for a case."""
    needs = job.requirements
    heads = needs.num_attention_heads, needs.num_key_value_heads
    return asked(
        case.rows, case.needs, heads, job.head_dims, job.dtype, seed, job.device, slid=case.slid
    )


def judged(job: Job, what: Asked, subject: Subject, lying: str = "dense") -> tuple[float, float]:
    declared = capabilities_of(subject).features
    return held(what.pieces, lambda pieces: called(job, what.with_pieces(pieces), declared, lying))


#: Rows for what does not depend on the situation.
_SOME = (
    Rows(0, 3),
    Rows(4, 1),
    Rows(0, 9, ((0, 1), ()), told=True),
    Rows(6, 4, ((), (3,)), told=True),
)


def _numbers(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    """Every dtype, every size of heads, and scores that overflow an exponential."""
    shape = sizes.usual(subject)
    some = [Case(rows, Needs()) for rows in _SOME]
    situation = partial(_Situation, subject, jobs)
    yield from sizes.checks("padded", subject, situation, some, list(_windows(subject)))
    wide = 400.0 if main_dtype(subject) in ("float32", "float64") else 60.0
    extreme = [Case(rows, Needs(spread=wide)) for rows in _SOME]
    yield Check(
        "padded.extreme_scores", "contract: scores of any size",
        _Situation(subject, jobs, shape), cases=extreme,
    )  # fmt: skip


def _windows(subject: Subject) -> Iterator[Case]:
    """Each window with a longer prompt: decode, a piece of it, and all of it where it is short."""
    for window, tokens in drawn.windows(subject):
        needs = Needs(window=window)
        yield Case(Rows(tokens - 1, 1, ((), (0, 1)), told=True), needs)
        yield Case(Rows(tokens - 37, 37), needs, slid=True)
        if window <= drawn.SHORT:
            yield Case(Rows(0, tokens), needs)


def _repeated(subject: Subject, jobs: Jobs) -> None:
    """Calls of one shape with other numbers, scales and padding, as layers and steps make them."""
    job, declared = jobs.bound("plain", "padded"), capabilities_of(subject).features
    cases = [
        Case(Rows(5, 2, ((0, 1), ()), told=True), Needs()),
        Case(Rows(5, 2, ((), (0, 1, 2)), told=True), Needs()),
        Case(Rows(5, 2, ((), ()), told=True), Needs(scaling=1.1)),
        Case(Rows(0, 7, ((), ())), Needs()),
        Case(Rows(6, 1, ((0,), ()), told=True), Needs()),
        Case(Rows(6, 1, ((), (0, 1)), told=True), Needs()),
    ]
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for again in range(3):
        for number, case in enumerate(cases):
            what = made(job, case, subject.seed + 10 * again + number)
            judged(job, what, subject)
            found = called(job, what, declared)
            kept.append((found, [one.clone() for one in found]))
    for found, before in kept:
        if not all(torch.equal(a, b) for a, b in zip(found, before, strict=True)):
            raise WrongError(
                "the output of a call changes in a later call: it is memory that is used again, "
                "and an output belongs to the model"
            )


def _gradients(subject: Subject, jobs: Jobs) -> str:
    """Refused, or those of the formula."""
    dtype = next((d for d in ("float64", "float32") if d in capabilities_of(subject).dtypes), None)
    if dtype is None:
        raise NotTriedError("it declares neither float32 nor float64")
    job = jobs.bound("plain", "padded", dtype=dtype)
    what = made(job, Case(Rows(0, 4, ((0,), ()), told=True), Needs()), subject.seed)
    from jackfield.testing.attention.gradients import compared

    return compared(job, what, capabilities_of(subject).features)
