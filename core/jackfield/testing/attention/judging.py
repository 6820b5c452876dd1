"""An output held to the truth, and what is wrong with it in words."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Sequence as Seq

import torch

from jackfield.testing.attention.faults import NEAR, Call, distance, misseen, named, problems
from jackfield.testing.attention.truth import Piece, attend, rounding
from jackfield.testing.checks import WrongError


class Worst:
    """The largest differences of a check so far, for its remark."""

    def __init__(self) -> None:
        self._off = 0.0
        self._share = 0.0

    def note(self, off: float, bound: float) -> str:
        self._off = max(self._off, off)
        self._share = max(self._share, off / bound if bound else 0.0)
        return f"at most {self._off:.2g} off, {self._share:.0%} of what rounding may be"


#: What earlier calls let queries see, the latest last: a mask that is kept is one of these.
_EARLIER: deque[list[torch.Tensor]] = deque(maxlen=64)


def held(pieces: Seq[Piece], call: Call, others: Seq[tuple[str, Call]] = ()) -> tuple[float, float]:
    """How far the output of `call` is off, and how far it may be.

    `others` are the same step with one thing simpler, after what it shows where that is right.

    Raises WrongError that names the first query that is off, and the mistake where it is a usual
    one.
    """
    found = call(pieces)
    truth = [attend(piece) for piece in pieces]
    bound = rounding(pieces, truth)
    where = next(problems(pieces, found, truth, bound), None)
    if where is not None:
        why = _why(pieces, call, found, bound, others)
        raise WrongError(f"{where}: {why}")
    _EARLIER.append([piece.seen for piece in pieces])
    for row, (piece, own) in enumerate(zip(pieces, found, strict=True)):
        if not bool(own[~piece.asked].isfinite().all()):
            raise WrongError(
                f"the output of a query that is padding, in sequence {row}, is not finite: it "
                "would spread through the values of the next layer"
            )
    return distance(pieces, found, truth), bound


def _why(
    pieces: Seq[Piece],
    call: Call,
    found: Seq[torch.Tensor],
    bound: float,
    others: Seq[tuple[str, Call]],
) -> str:
    truth = [attend(piece) for piece in pieces]
    off = distance(pieces, found, truth)
    again = distance(pieces, call(pieces), truth)
    if again <= bound:
        return (
            "the same numbers once more give the right output: a table, a plan or a mask of an "
            "earlier call is taken for this one's"
        )
    if off == off and off != float("inf"):
        earlier = _earlier(pieces, found, off)
        if name := named(pieces, found, off, bound):
            return f"{name}; or {earlier}" if earlier else name
        if earlier:
            return earlier
    simpler = _right_in(others, pieces, truth, bound)
    if not all(bool(own.isfinite().all()) for own in found):
        return simpler or _not_finite(pieces, call)
    told = [words for words in (misseen(pieces, call), simpler) if words]
    usual = "no usual mistake explains it; what is seen is right, and the numbers are not"
    return "; ".join(told) or usual


def _right_in(
    others: Seq[tuple[str, Call]], pieces: Seq[Piece], truth: Seq[torch.Tensor], bound: float
) -> str | None:
    """What the first of `others` shows that is right; one that raises shows nothing."""
    for words, call in others:
        with contextlib.suppress(Exception):
            if distance(pieces, call(pieces), truth) <= bound:
                return words
    return None


def _earlier(pieces: Seq[Piece], found: Seq[torch.Tensor], off: float) -> str | None:
    """Whether what may be seen is what could be seen in an earlier call of the same shape."""
    for masks in _EARLIER:
        if [mask.shape for mask in masks] != [piece.seen.shape for piece in pieces]:
            continue
        if all(map(torch.equal, masks, (piece.seen for piece in pieces))):
            continue
        full = [torch.ones_like(piece.reached) for piece in pieces]
        made = [
            dataclasses.replace(piece, reached=mask, inside=own, valid=own[0])
            for piece, mask, own in zip(pieces, masks, full, strict=True)
        ]
        away = distance(pieces, found, [attend(piece) for piece in made])
        if away < NEAR * off:
            return "the mask is that of an earlier call of the same shape"
    return None


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
