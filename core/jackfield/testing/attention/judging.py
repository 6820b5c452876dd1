"""An output held to the truth, and what is wrong with it in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jackfield.testing.attention.faults import Call, distance, misseen, named, problems
from jackfield.testing.attention.truth import Piece, attend, rounding
from jackfield.testing.checks import WrongError

if TYPE_CHECKING:
    import torch


class Worst:
    """The largest differences of a check so far, for its remark."""

    def __init__(self) -> None:
        self._off = 0.0
        self._share = 0.0

    def note(self, off: float, bound: float) -> str:
        self._off = max(self._off, off)
        self._share = max(self._share, off / bound if bound else 0.0)
        return f"at most {self._off:.2g} off, {self._share:.0%} of what rounding may be"


def held(pieces: Seq[Piece], call: Call) -> tuple[float, float]:
    """How far the output of `call` is off, and how far it may be.

    Raises WrongError that names the first query that is off, and the mistake where it is a usual
    one.
    """
    found = call(pieces)
    truth = [attend(piece) for piece in pieces]
    bound = rounding(pieces, truth)
    where = next(problems(pieces, found, truth, bound), None)
    if where is not None:
        why = _why(pieces, call, found, bound)
        raise WrongError(f"{where}: {why}")
    for row, (piece, own) in enumerate(zip(pieces, found, strict=True)):
        if not bool(own[~piece.asked].isfinite().all()):
            raise WrongError(
                f"the output of a query that is padding, in sequence {row}, is not finite: it "
                "would spread through the values of the next layer"
            )
    return distance(pieces, found, truth), bound


def _why(pieces: Seq[Piece], call: Call, found: Seq[torch.Tensor], bound: float) -> str:
    truth = [attend(piece) for piece in pieces]
    off = distance(pieces, found, truth)
    if off == off and off != float("inf") and (name := named(pieces, found, off, bound)):
        return name
    if not all(bool(own.isfinite().all()) for own in found):
        return _not_finite(pieces, call)
    seen = misseen(pieces, call)
    return seen or "no usual mistake explains it; what is seen is right, and the numbers are not"


def _not_finite(pieces: Seq[Piece], call: Call) -> str:
    """Whether numbers are finite where scores are small."""
    smaller = [dataclasses.replace(piece, query=piece.query * 1e-3) for piece in pieces]
    if all(bool(own.isfinite().all()) for own in call(smaller)):
        return (
            "it is finite where scores are small: the largest score is not subtracted before "
            "the exponentials"
        )
    return (
        "it is not finite for small scores either: it reads what nobody has written, or divides "
        "by 0"
    )
