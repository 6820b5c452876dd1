"""Padded steps: which columns there are, whose queries they are, and what may be seen of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from jackfield.testing.attention.truth import Piece

GARBAGE = 300.0  # values in columns that nobody may see


@dataclass(frozen=True)
class Rows:
    """A step of rows of equal length.

    Attributes:
        past: Columns before the queries.
        queries: Columns of queries, which lie behind the past.
        gaps: For each row, the columns that are no tokens: padding on its left, rejected drafts.
        told: Whether there is an `attention_mask`; without one, there are no gaps.
        unwritten: Columns behind the queries that a static cache has not written yet.
        on_device: `q_offset` is a tensor, as a static cache gives it.
    """

    past: int
    queries: int
    gaps: tuple[tuple[int, ...], ...] = ((),)
    told: bool = False
    unwritten: int = 0
    on_device: bool = False

    def __str__(self) -> str:
        rows, keys = len(self.gaps), self.past + self.queries
        text = f"{_count(rows, 'row')}, {_count(self.queries, 'query')}, {_count(keys, 'key')}"
        if self.unwritten:
            text += f", {self.unwritten} columns unwritten"
        if any(self.gaps):
            text += f", columns that are none: {[list(gap) for gap in self.gaps]}"
        return text


def _count(number: int, what: str) -> str:
    plural = {"query": "queries"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else plural}"


def _left(past: int, queries: int, *pads: int) -> Rows:
    return Rows(past, queries, tuple(tuple(range(pad)) for pad in pads), told=True)


#: situation -> its cases, from the smallest up.
SITUATIONS: Mapping[str, tuple[Rows, ...]] = {
    "prefill": (
        Rows(0, 1), Rows(0, 2), Rows(0, 3), Rows(0, 7), Rows(0, 6, ((), ()), told=True),
        Rows(0, 33, ((), (), ())),
    ),
    "left_padding": (
        _left(0, 2, 0, 1), _left(0, 5, 2, 0), _left(0, 9, 0, 8, 3), _left(0, 40, 17, 0),
    ),
    "chunks": (
        Rows(1, 2), Rows(5, 3), Rows(6, 7, ((), ()), told=True), _left(4, 3, 0, 3),
        _left(30, 17, 21, 0, 5),
    ),
    "decode": (
        Rows(1, 1), Rows(4, 1), Rows(9, 1, ((), (), ())), _left(3, 1, 0, 2), _left(9, 1, 6, 0, 9),
        _left(70, 1, 0, 40),
    ),
    "drafts": (
        Rows(4, 3, ((3,),), told=True), Rows(8, 4, ((), (3, 4)), told=True),
        Rows(12, 5, ((0, 1, 2, 5, 9), (4, 11), (0,)), told=True),
    ),
    "long": (
        Rows(1024, 1), Rows(0, 140), Rows(2100, 1), _left(4096, 1, 0, 3000), Rows(8200, 1),
        Rows(5, 1025), Rows(9, 1, ((),) * 130),
    ),
    "unwritten": (
        Rows(0, 2, unwritten=3), Rows(0, 5, ((0, 1), ()), told=True, unwritten=11),
        Rows(5, 1, unwritten=10), Rows(5, 1, on_device=True, unwritten=4),
        Rows(5, 3, ((), (0, 1)), told=True, unwritten=8, on_device=True),
    ),
}  # fmt: skip

TITLES = {
    "prefill": "prefill", "left_padding": "left padding", "chunks": "chunks of a prompt",
    "decode": "decode", "drafts": "drafts, some rejected", "unwritten": "static caches",
    "long": "thousands of keys, and many rows",
}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """What a step needs of its attention beyond softmax(QKᵀ)V: each feature's own numbers."""

    window: int | None = None
    block: int | None = None
    chunk: int | None = None
    prefix: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    own_mask: bool = False
    scaling: float = 0.41
    spread: float = 1.0

    def shown(self) -> list[str]:
        """What it needs, in words."""
        usual = Needs()
        return [
            f"{name} {value}" if value is not True else name
            for name, value in vars(self).items()
            if value != getattr(usual, name)
        ]


@dataclass(frozen=True, eq=False)
class Asked:
    """Rows with numbers: what is asked of an attention in one call.

    Attributes:
        pieces: One a row, with all columns from `kv_offset` on.
        kv_offset: The first column that there is; others fell out of a sliding cache.
    """

    rows: Rows
    needs: Needs
    pieces: Seq[Piece]
    kv_offset: int
    mask_function: Callable[..., Any]
    attention_mask: torch.Tensor | None
    plain: bool

    def with_pieces(self, pieces: Seq[Piece]) -> Asked:
        return replace(self, pieces=pieces)


def asked(
    rows: Rows,
    needs: Needs,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    device: str,
    *,
    slid: bool = False,
) -> Asked:
    """Random numbers for `rows`, on `device`. `heads` are those of queries and of keys.

    `slid`: the cache has let go of what no window reaches.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = rows.past + rows.queries + rows.unwritten
    offset = max(0, rows.past + 1 - needs.window) if slid and needs.window else 0
    valid = torch.ones(len(rows.gaps), columns, dtype=torch.bool, device=device)
    for row, gap in zip(valid, rows.gaps, strict=True):
        row[list(gap)] = False
    valid[:, rows.past + rows.queries :] = False
    function, plain = _mask_function(needs, valid, rows.past + rows.queries)
    sees, inside = _sees(function, rows, valid), _inside(needs, rows, valid)

    def made(*shape: int, wide: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * wide).to(device, dtype)

    sinks = made(heads[0]) if needs.sinks else None
    pieces = []
    for row in range(len(rows.gaps)):
        keys, values = made(heads[1], columns, head_dims[0]), made(heads[1], columns, head_dims[1])
        nothing = ~valid[row][:, None]
        values, keys = values.masked_fill(nothing, GARBAGE), keys.where(~nothing, 3 * keys)
        bias = (
            made(heads[0], rows.queries, columns, wide=2) if needs.bias or needs.own_mask else None
        )
        piece = Piece(
            made(heads[0], rows.queries, head_dims[0], wide=needs.spread), keys, values,
            sees[row], inside[row], valid[row], rows.past, needs.scaling, needs.softcap, sinks,
            bias, needs.window,
        )  # fmt: skip
        pieces.append(_from(piece, offset))
    told = valid[:, : rows.past + rows.queries] if rows.told else None
    return Asked(rows, needs, pieces, offset, function, told, plain)


def _from(piece: Piece, offset: int) -> Piece:
    """`piece` without the columns before `offset`."""
    return replace(
        piece,
        keys=piece.keys[:, offset:], values=piece.values[:, offset:],
        reached=piece.reached[:, offset:], inside=piece.inside[:, offset:],
        valid=piece.valid[offset:], at=piece.at - offset,
        bias=None if piece.bias is None else piece.bias[:, :, offset:],
    )  # fmt: skip


def _mask_function(
    needs: Needs, valid: torch.Tensor, written: int
) -> tuple[Callable[..., Any], bool]:
    """What transformers hands to the mask function; and whether it calls that plainly causal."""
    if needs.window is not None:
        return sliding_window_causal_mask_function(needs.window), True
    if needs.chunk is not None:
        return chunked_causal_mask_function(needs.chunk, _left_padding(valid)), True
    if needs.prefix is not None:
        end = min(needs.prefix, written)

        def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (query < end) & (key < end)

        return or_masks(causal_mask_function, prefix), False
    if needs.own_mask:
        return and_masks(causal_mask_function), True
    return causal_mask_function, True


def _left_padding(valid: torch.Tensor) -> torch.Tensor:
    return valid.int().argmax(1)


def _sees(function: Callable[..., Any], rows: Rows, valid: torch.Tensor) -> torch.Tensor:
    """bool `[rows, queries, columns]`: what the mask function reaches, windows aside."""
    batch, query, key = _places(rows, valid)
    whole: torch.Tensor = function(batch, torch.zeros_like(batch[:1]), query, key)
    return (whole | (key <= query)).expand(len(batch), query.shape[1], key.shape[2])


def _inside(needs: Needs, rows: Rows, valid: torch.Tensor) -> torch.Tensor:
    batch, query, key = _places(rows, valid)
    inside = valid.new_ones(len(batch), query.shape[1], key.shape[2])
    if needs.window is not None:
        inside &= key > query - needs.window
    if needs.chunk is not None:
        left = _left_padding(valid)[batch]
        inside &= (key - left) // needs.chunk == (query - left) // needs.chunk
    return inside


def _places(rows: Rows, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of rows, queries and columns, each along a dimension of its own."""
    count, columns = valid.shape
    of_rows = torch.arange(count, device=valid.device)
    key = torch.arange(columns, device=valid.device)
    query = key[rows.past : rows.past + rows.queries]
    return of_rows[:, None, None], query[None, :, None], key[None, None]
