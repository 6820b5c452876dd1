"""Checks of `packed`: the packed layout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from jackfield.contracts import NativeCall, PackedLayer
from jackfield.contracts.native import ROOM
from jackfield.testing.attention import drawn, sizes, steps
from jackfield.testing.attention.calls import held_to_shape
from jackfield.testing.attention.faults import Call
from jackfield.testing.attention.jobs import Job, Jobs, capabilities_of, main_dtype
from jackfield.testing.attention.judging import held
from jackfield.testing.attention.rows import Needs
from jackfield.testing.attention.shapes import SHAPES, Shape
from jackfield.testing.attention.steps import SITUATIONS, TITLES, Packed
from jackfield.testing.attention.truth import Piece
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.native import agrees, repeats
from jackfield.testing.subject import Subject
from jackfield.testing.watching import Snapshot


@dataclass(frozen=True)
class Case:
    """A packed step, and what it needs."""

    packed: Packed
    needs: Needs
    silent: bool = False  # the window is in the layer alone, not among the keywords

    def __str__(self) -> str:
        return ", ".join([str(self.packed), *self.needs.shown()])


def checks(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    """All that is checked of the packed layout, by direct calls."""
    declared = capabilities_of(subject).features
    for shape in SHAPES:
        if not shape.packed or not shape.declared(declared):
            continue
        for situation in SITUATIONS:
            if not _is_for(situation, shape):
                continue
            yield Check(
                f"packed.{situation}.{shape.title}",
                f"layouts: packed, {TITLES[situation]}"
                + (f"; features: {shape.feature}" if shape.feature else ""),
                Situation(subject, jobs, shape),
                cases=list(_cases(shape, _steps(situation, subject), declared)),
                large=situation in steps.LARGE,
            )
    yield from _numbers(subject, jobs)


def _is_for(situation: str, shape: Shape) -> bool:
    """Whether a shape is tried in a situation."""
    if not shape.padded:
        return situation in steps.WITH_BLOCKS
    return situation not in steps.LARGE or shape.title in ("plain", "sliding_window")


def _steps(situation: str, subject: Subject) -> Seq[Packed]:
    known = SITUATIONS[situation]
    if situation != "long_decode":
        return known
    return (*known, Packed(((1, drawn.far(subject)),), 64))


def _cases(shape: Shape, steps: Seq[Packed], declared: frozenset[str]) -> Iterator[Case]:
    for number, packed in enumerate(steps):
        for needs in shape.needs(declared):
            yield Case(packed, needs, silent=number % 2 == 1)


class Situation(sizes.Situation):
    """Of the packed layout."""

    def __call__(self, case: Case) -> str:
        job = self._jobs.bound(self._shape.model, "packed", **self._how)
        pieces = made(job, case, self._subject.seed)
        return self._worst.note(*judged(job, pieces, case, self._subject))


def made(job: Job, case: Case, seed: int) -> list[Piece]:
    """Random numbers for a case."""
    needs = job.requirements
    heads = needs.num_attention_heads, needs.num_key_value_heads
    return steps.pieces_of(
        case.packed, case.needs, heads, job.head_dims, job.dtype, seed, job.device
    )


def judged(job: Job, pieces: Seq[Piece], case: Case, subject: Subject) -> tuple[float, float]:
    def lying(packed: Packed) -> Call:
        own = dataclasses.replace(case, packed=packed)

        def call(pieces: Seq[Piece]) -> list[torch.Tensor]:
            layer = steps.layer_of(pieces, packed, case.needs.window, subject.seed)
            return called(job, pieces, own, layer, subject)

        return call

    simpler = [(words, lying(packed)) for words, packed in steps.simpler(case.packed)]
    return held(pieces, lying(case.packed), simpler)


def called(
    job: Job, pieces: Seq[Piece], case: Case, layer: PackedLayer, subject: Subject
) -> list[torch.Tensor]:
    """The output of each sequence, `[queries, heads, value_dim]`; raises as for padded calls."""
    if job.bound.packed is None:
        raise WrongError("it declares the packed layout, and bind returns no `packed` function")
    given = keywords(job, pieces[0], case, capabilities_of(subject).features)
    with torch.inference_mode():
        query = steps.queries_of(pieces, case.packed)
        lent = Snapshot(query=query, layer=layer, sinks=given.get("s_aux"))
        output = job.bound.packed(job.module, query, layer, **given)
        tokens, heads, _ = query.shape
        held_to_shape(output, (tokens, heads, layer.values.shape[3]), query, "packed")
        lent.check()
        lent.check_own(output)
        _hold_native(job, query, layer, output, given)
        _hold_again(job, query, layer, output, given)
        lent.check()
        return list(output.split([span.query_len for span in layer.step.spans]))


def _hold_native(
    job: Job, query: torch.Tensor, layer: PackedLayer, output: torch.Tensor, given: dict[str, Any]
) -> None:
    """What it offers in place of this call of `packed` says the same. Raises WrongError."""
    offered = job.bound.native
    if offered is None:
        return

    def native(out: torch.Tensor) -> NativeCall | None:
        return offered(query, layer, out, **given)

    agrees("native", native, output, room=ROOM)


def _hold_again(
    job: Job, query: torch.Tensor, layer: PackedLayer, output: torch.Tensor, given: dict[str, Any]
) -> None:
    """A call of one step, run in one with other tables. Raises WrongError."""
    native, again, packed = job.bound.native, job.bound.native_again, job.bound.packed
    if native is None or again is None or packed is None:
        return
    out = torch.full_like(output, float("nan"))
    call = native(query, layer, out, **given)
    if call is None:
        return
    moved = _moved(layer)
    with _filled(layer.keys), _filled(layer.values):
        due = packed(job.module, query, moved, **given)
        if again(moved.tables):
            repeats("native, where native_again says that it reads other tables,", call, out, due)


@contextlib.contextmanager
def _filled(pool: torch.Tensor) -> Iterator[None]:
    """Numbers where no token is: another sequence's last page is read to its end."""
    gaps = pool.isnan()
    pool.masked_fill_(gaps, 0.5)
    try:
        yield
    finally:
        pool.masked_fill_(gaps, float("nan"))


def _moved(layer: PackedLayer) -> PackedLayer:
    """The same pools, where every sequence has the pages that another page number stands for."""
    tables = layer.tables
    used = sorted({page for pages in tables.tables for page in pages})
    other = dict(zip(used, used[1:] + used[:1], strict=True))
    block = tables.block_table.clone()
    moved = [[other[page] for page in pages] for pages in tables.tables]
    for row, pages in zip(block, moved, strict=True):
        row[: len(pages)] = block.new_tensor(pages)
    found = dataclasses.replace(tables, block_table=block, tables=moved, in_a_row=(), runs=())
    return PackedLayer(layer.keys, layer.values, found)


def keywords(job: Job, piece: Piece, case: Case, declared: frozenset[str]) -> dict[str, Any]:
    """The keyword arguments of a layer's call."""
    module: Any = job.module
    module.scaling = case.needs.scaling
    if piece.sinks is not None and hasattr(module, "sinks"):
        module.sinks.data = piece.sinks.clone()
    found: dict[str, Any] = {"dropout": 0.0, "scaling": case.needs.scaling}
    if "sliding_window" in declared:
        found["sliding_window"] = None if case.silent else case.needs.window
    if "softcap" in declared:
        found["softcap"] = case.needs.softcap
    if "sinks" in declared:
        found["s_aux"] = piece.sinks
    return found


#: Steps for what does not depend on the situation.
SOME = (
    Packed(((3, 3),)), Packed(((1, 9), (1, 4))), Packed(((5, 9), (1, 20), (4, 4)), 16),
)  # fmt: skip


def _numbers(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    """Every dtype, every size of heads, sizes of pages, and scores that overflow an exponential."""
    can = capabilities_of(subject)
    shape = sizes.usual(subject)
    some = [Case(packed, Needs()) for packed in SOME]
    situation = partial(Situation, subject, jobs)
    yield from sizes.checks("packed", subject, situation, some, list(_windows(subject)))
    paged = [Packed(((1, 37), (6, 19)), size) for size in (1, 2, 7, 16, 64, 128)]
    yield Check(
        "packed.page_sizes", "layouts: packed, pages of any size",
        Situation(subject, jobs, shape), cases=[Case(packed, Needs()) for packed in paged],
    )  # fmt: skip
    wide = 400.0 if main_dtype(subject) in ("float32", "float64") else 60.0
    yield Check(
        "packed.extreme_scores", "contract: scores of any size",
        Situation(subject, jobs, shape), cases=[Case(p, Needs(spread=wide)) for p in SOME],
    )  # fmt: skip
    if "sinks" in can.features:
        sinks = next(s for s in SHAPES if s.title == "sinks")
        yield Check(
            "packed.extreme_scores.sinks", "contract: scores of any size; features: sinks",
            Situation(subject, jobs, sinks),
            cases=[Case(p, Needs(sinks=True, spread=wide)) for p in SOME],
        )  # fmt: skip


def _windows(subject: Subject) -> Iterator[Case]:
    """Each window with a longer prompt: decode, a piece of it, and all of it where it is short."""
    for window, tokens in drawn.windows(subject):
        needs = Needs(window=window)
        yield Case(Packed(((1, tokens), (1, 3), (1, tokens)), 16), needs)
        yield Case(Packed(((37, tokens),), 16), needs, silent=True)
        if window <= drawn.SHORT:
            yield Case(Packed(((tokens, tokens),), 32), needs)
