"""What `recordable` promises, as far as it shows without a GPU.

A recording is played with other lengths and pages in the same tensors. So a call of single queries
must read these from the tensors, never wait for one of them, and believe nothing of the host's
numbers but that they are the most there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jackfield.contracts import PackedLayer, PackedStep, PageTables, Span
from jackfield.testing.attention import steps
from jackfield.testing.attention.jobs import Job, Jobs, capabilities_of
from jackfield.testing.attention.judging import held
from jackfield.testing.attention.packed import Case, keywords, made
from jackfield.testing.attention.rows import Needs
from jackfield.testing.attention.steps import Packed
from jackfield.testing.attention.truth import Piece
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.models import WINDOW
from jackfield.testing.subject import Subject

_MOST = 64  # tokens that there is room for
_ROWS = 4
_WAITS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
     "argwhere", "is_nonzero", "equal", "allclose", "masked_select", "unique"}
)  # fmt: skip


class _NoWaiting(TorchFunctionMode):
    """Raises where the host would wait for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moved = name == "to" and any(str(arg) == "cpu" for arg in args[1:])
        if name in _WAITS or moved:
            raise WrongError(
                f"it declares recordable and waits for the device: it calls {name}() on a tensor; "
                "lengths and pages are to be read on the device"
            )
        return func(*args, **(kwargs or {}))


def checks(subject: Subject, jobs: Jobs) -> Iterator[Check]:
    can = capabilities_of(subject)
    if not can.recordable:
        yield Check(
            "packed.recordable", "recordable", lambda _: _not_recordable(subject, jobs),
            refusal=True,
        )  # fmt: skip
        return
    windows = (None, WINDOW) if "sliding_window" in can.features else (None,)
    yield Check(
        "packed.recordable", "recordable", lambda window: _recorded(subject, jobs, window),
        cases=windows,
    )  # fmt: skip


def _not_recordable(subject: Subject, jobs: Jobs) -> None:
    needs = jobs.bound("plain", "packed").requirements
    if not subject.registered.ask("unrecordable", needs, subject.options):
        raise WrongError("`unrecordable` has no reason, and recordable is not declared")


def _recorded(subject: Subject, jobs: Jobs, window: int | None) -> None:
    """Steps at one place in memory, whose host lists say no more than what may be."""
    job = jobs.bound("sliding_window" if window else "plain", "packed")
    if reasons := subject.registered.ask("unrecordable", job.requirements, subject.options):
        raise WrongError(f"recordable is declared, and `unrecordable` says: {'; '.join(reasons)}")
    place = _place(window, job.device)
    for number, lengths in enumerate(((9, 4, 17), (10, 5, 18), (3, 30), (1,))):
        packed = Packed(tuple((1, length) for length in lengths))
        case = Case(packed, Needs(window=window))
        pieces = made(job, case, subject.seed + number)
        step = steps.step_of(packed, job.device)
        tables = steps.tables_of(packed, step, window, subject.seed + number)
        _fill(place, tables)
        try:
            held(pieces, _Played(subject, job, case, tables, place))
        except WrongError as error:
            if "recordable" in str(error):
                raise
            raise WrongError(
                f"with lengths and pages on the device, and only the most that they may be on the "
                f"host: {error}"
            ) from None


@dataclass(frozen=True, eq=False)
class _Played:
    """Calls for a step at one place in memory. `tables` is what is so, `place` what is said."""

    subject: Subject
    job: Job
    case: Case
    tables: PageTables
    place: PageTables

    def __call__(self, pieces: Seq[Piece]) -> list[torch.Tensor]:
        packed = self.job.bound.packed
        assert packed is not None
        keys, values = steps.pools_of(pieces, self.tables, steps.pages_of(self.case.packed))
        keys[0], values[0] = 0.0, 0.0  # the spare page, which rows that are nobody's read
        layer = PackedLayer(keys, values, self.place)
        query = steps.queries_of(pieces, self.case.packed)
        whole = torch.cat([query, query.new_zeros(_ROWS - len(query), *query.shape[1:])])
        declared = capabilities_of(self.subject).features
        given = keywords(self.job, pieces[0], self.case, declared)
        with torch.inference_mode(), _NoWaiting():
            output: torch.Tensor = packed(self.job.module, whole, layer, **given)
        return list(output[: len(pieces)].split(1))


def _place(window: int | None, device: str) -> PageTables:
    """Tables of single queries, as a cache of fixed places makes them."""
    starts = torch.arange(_ROWS + 1, dtype=torch.int32, device=device)
    zeros, table = torch.zeros_like(starts[:_ROWS]), starts.new_zeros(_ROWS, _MOST // 4)
    step = PackedStep(
        [Span(row, 1, _MOST) for row in range(_ROWS)],
        starts, torch.ones_like(zeros),
        max_seqlen_q=1, max_seqlen_k=_MOST,
    )  # fmt: skip
    return PageTables(step, window, 4, table, zeros, [], [])


def _fill(place: PageTables, tables: PageTables) -> None:
    """Have `place` say on the device what `tables` says; rows behind it are nobody's."""
    count, width = tables.block_table.shape
    place.block_table.zero_()
    place.block_table[:count, :width] = tables.block_table
    place.first.zero_()
    place.first[:count] = tables.first
    place.step.seq_lens.fill_(1)
    place.step.seq_lens[:count] = tables.step.seq_lens
