"""What is differentiated through a padded attention: refused, or as the formula has it."""

from __future__ import annotations

from dataclasses import replace

import torch

from jackfield.testing.attention.calls import first_of, keywords, mask_of, prepared, stacked
from jackfield.testing.attention.jobs import Job
from jackfield.testing.attention.rows import Asked
from jackfield.testing.attention.truth import Piece, attend
from jackfield.testing.checks import WrongError

_NAMES = ("query", "keys", "values")


def compared(job: Job, what: Asked, declared: frozenset[str]) -> str:
    """ "refused", or that they are right. Raises WrongError."""
    prepared(job, what)
    given = [tensor.requires_grad_() for tensor in stacked(what.pieces)]
    try:
        with torch.enable_grad():
            found = job.bound.forward(
                job.module, *given, mask_of(job, what), **keywords(job, what, declared)
            )
            output = first_of(found)
    except Exception as error:  # noqa: BLE001 - a refusal, in its own words
        return f"refused: {error}"
    asked = torch.stack([piece.asked for piece in what.pieces])
    if not output.requires_grad:
        raise WrongError(
            "it computes no gradients and does not say so: a model that is trained through it "
            "learns nothing; raise where query.requires_grad"
        )
    weights = torch.linspace(
        -1, 1, output.numel(), dtype=output.dtype, device=output.device
    ).view_as(output)
    own = torch.autograd.grad((output * weights)[asked].sum(), given, allow_unused=True)
    leaves = [tensor.detach().double().requires_grad_() for tensor in given]
    pieces = [
        replace(piece, query=leaves[0][row], keys=leaves[1][row], values=leaves[2][row])
        for row, piece in enumerate(what.pieces)
    ]
    exact = torch.cat([attend(_asked(piece)) for piece in pieces])
    due = torch.autograd.grad((exact * weights.double()[asked]).sum(), leaves)
    valid = torch.stack([piece.valid for piece in what.pieces])
    for name, mine, right in zip(_NAMES, own, due, strict=True):
        if mine is None:
            raise WrongError(f"there is no gradient of its {name}")
        away = (mine.double() - right).abs().amax((1, 3))
        off = float(away[asked if name == "query" else valid].max())
        allowed = 2e-4 * float(right.abs().nan_to_num().max())
        if not off <= allowed:
            raise WrongError(
                f"the gradient of its {name} is off by {off:.3g} (at most {allowed:.2g} is "
                "rounding)"
            )
    return "right"


def _asked(piece: Piece) -> Piece:
    """`piece` without the queries that see nothing, whose gradients are NaN."""
    of = piece.asked
    return replace(piece, query=piece.query[:, of], reached=piece.reached[of],
                   inside=piece.inside[of])  # fmt: skip
