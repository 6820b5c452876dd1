"""Softmax block by block, as flash kernels have it, and what is forgotten between two blocks.

The running maximum and sums are those of Milakov & Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from jackfield.testing.attention.truth import Piece, scores_of

#: Keys of a block.
SIZES = (16, 32, 64, 128, 256)
_LEAST = -1e30


def without_rescaling(piece: Piece, size: int, *, sums: bool, outputs: bool) -> torch.Tensor:
    """The output where earlier blocks are not rescaled; what is right where there is one only.

    `sums`: the sums of exponentials are rescaled all the same; `outputs`: what is mixed of values.
    """
    scores = scores_of(piece)
    heads, queries, width = scores.shape
    values = piece.values.double()
    values = values.repeat_interleave(heads // values.shape[0], 0)
    largest = scores.new_full((heads, queries, 1), _LEAST)
    total = torch.zeros_like(largest)
    if piece.sinks is not None:
        largest = piece.sinks.double().view(-1, 1, 1).expand_as(largest)
        total = torch.ones_like(largest)
    mixed = scores.new_zeros(heads, queries, values.shape[2])
    for at in range(0, width, size):
        seen = piece.seen[:, at : at + size]
        own = scores[:, :, at : at + size].masked_fill(~seen, _LEAST)
        new = torch.maximum(largest, own.amax(2, keepdim=True))
        weights = (own - new).exp().masked_fill(~seen, 0.0)
        before = (largest - new).exp()
        total = total * (before if sums else 1.0) + weights.sum(2, keepdim=True)
        mixed = mixed * (before if outputs else 1.0) + weights @ values[:, at : at + size]
        largest = new
    return (mixed / total.clamp(min=1e-300)).transpose(0, 1)


def _mistakes() -> Iterator[tuple[str, Callable[[Piece], torch.Tensor]]]:
    for size in SIZES:
        for what, sums, outputs in (
            ("the sums of exponentials", False, True),
            ("the mixed values", True, False),
            ("sums and mixed values", False, False),
        ):
            told = (
                f"{what} of earlier blocks of {size} keys are not rescaled where a later block "
                "has a larger score"
            )
            yield told, partial(without_rescaling, size=size, sums=sums, outputs=outputs)


MISTAKES = tuple(_mistakes())
