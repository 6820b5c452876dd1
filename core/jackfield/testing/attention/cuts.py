"""Mistakes with sizes: what ends at a power of two, and windows and groups of another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from jackfield.testing.attention.truth import Piece, attend
from jackfield.testing.models import WINDOW

Mistake = Callable[[Piece], "torch.Tensor | Piece | None"]

#: Where a kernel's blocks of numbers of a head end, and its windows.
HEADS = (16, 32, 64, 128, 256)
WINDOWS = (WINDOW, 8, 16, 32, 64, 128, 256, 512, 1024)


def _keys_back(piece: Piece) -> torch.Tensor:
    """int `[queries, keys]`: how many keys each lies before the query; below 0: behind it."""
    queries, keys = piece.reached.shape
    key = torch.arange(keys, device=piece.reached.device)
    return torch.arange(queries, device=key.device)[:, None] + piece.at - key


def _windowed(size: int, *, where_none_is: bool) -> Mistake:
    """A window of `size`, in layers that have none, or in place of a longer one."""

    def changed(piece: Piece) -> Piece | None:
        if where_none_is != (piece.window is None) or (piece.window or size + 1) <= size:
            return None
        return replace(piece, inside=piece.inside & (_keys_back(piece) < size))

    return changed


def _grouped(other: Callable[[int], int]) -> Mistake:
    """Query heads that share key heads in groups of another size, none of which is left out."""

    def changed(piece: Piece) -> Piece | None:
        heads, own = piece.query.shape[0], piece.keys.shape[0]
        if own in (1, heads) or other(heads // own) == heads // own:
            return None
        shares = (torch.arange(heads) // other(heads // own)).clamp(max=own - 1)
        return replace(piece, keys=piece.keys[shares], values=piece.values[shares])

    return changed


def _scored_by(size: int) -> Mistake:
    """Scores of the first numbers of queries and keys alone."""

    def changed(piece: Piece) -> Piece | None:
        if piece.query.shape[2] <= size:
            return None
        return replace(piece, query=piece.query[..., :size], keys=piece.keys[..., :size])

    return changed


def _mixed_up_to(size: int) -> Mistake:
    """Outputs of the first numbers of values alone."""

    def changed(piece: Piece) -> torch.Tensor | None:
        if piece.values.shape[2] <= size:
            return None
        right = attend(piece).clone()
        right[..., size:] = 0.0
        return right

    return changed


def _below(group: int) -> int:
    return int(1 << (group.bit_length() - 1))


def _above(group: int) -> int:
    return int(1 << (group - 1).bit_length())


def _mistakes() -> Iterator[tuple[str, Mistake]]:
    applied = "a window of {} is applied in a layer that has none"
    yield applied.format(f"{WINDOW} keys"), _windowed(WINDOW, where_none_is=True)
    yield applied.format("1 key"), _windowed(1, where_none_is=True)
    for size in WINDOWS:
        yield f"windows end after {size} keys", _windowed(size, where_none_is=False)
    for which, other in (("next smaller", _below), ("next larger", _above)):
        told = (
            f"query heads share key heads in groups of the {which} power of two, and their groups "
            "are of another size"
        )
        yield told, _grouped(other)
    for size in HEADS:
        yield (
            f"scores are made of the first {size} numbers of a head alone, and heads are larger",
            _scored_by(size),
        )
        yield (
            f"outputs have the first {size} numbers of a head alone, and heads are larger",
            _mixed_up_to(size),
        )


MISTAKES = tuple(_mistakes())
