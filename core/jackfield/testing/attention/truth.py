"""What attention means, written out for one sequence at a time, in float64.

softmax(scaling · QKᵀ) V over the keys that a query sees (Vaswani et al. 2017, arXiv:1706.03762),
with what models add: caps on scores, sinks, biases.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Piece:
    """One sequence's queries in a step, and what they see.

    Attributes:
        query: `[heads, queries, head_dim]`.
        keys: `[kv_heads, keys, head_dim]`.
        values: `[kv_heads, keys, value_dim]`.
        reached: bool `[queries, keys]`: keys that are not later, or that a prefix opens.
        inside: bool `[queries, keys]`: keys within the window or the chunk.
        valid: bool `[keys]`: keys that are no padding and not rejected.
        at: The column of the first query among the keys.
        scaling: What scores are multiplied with.
        softcap: Squashes scores s to cap · tanh(s / cap).
        sinks: `[heads]`.
        bias: `[heads, queries, keys]`, added to the scores.
        window: Of `inside`, where that is a window.
        blocks: Tokens that see on to the end of their block, `(begin, end)` among the keys.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    reached: torch.Tensor
    inside: torch.Tensor
    valid: torch.Tensor
    at: int
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    window: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def seen(self) -> torch.Tensor:
        """bool `[queries, keys]`."""
        return self.reached & self.inside & self.valid

    @property
    def asked(self) -> torch.Tensor:
        """bool `[queries]`: those that see anything; the others are padding."""
        return self.seen.any(1)


def scores_of(piece: Piece, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """`[heads, queries, keys]`, before anything is left out."""
    query, keys = piece.query.to(dtype), piece.keys.to(dtype)
    keys = keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)
    scores = query @ keys.transpose(1, 2) * piece.scaling
    if piece.softcap is not None:
        scores = piece.softcap * torch.tanh(scores / piece.softcap)
    return scores if piece.bias is None else scores + piece.bias.to(dtype)


def attend(piece: Piece, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """`[queries, heads, value_dim]`, rounded to `dtype` at every step; NaN for what sees nothing.

    The softmax of less than float32 is float32's, as in transformers' own attention.
    """
    scores = scores_of(piece, dtype).masked_fill(~piece.seen, float("-inf"))
    return mixed(piece, scores)


def mixed(piece: Piece, scores: torch.Tensor) -> torch.Tensor:
    """The values of `piece`, mixed by `scores` `[heads, queries, keys]`."""
    dtype, width = scores.dtype, scores.shape[2]
    if piece.sinks is not None:
        sinks = piece.sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = scores.softmax(2, dtype=wide).to(dtype)[:, :, :width]
    values = piece.values.to(dtype)
    values = values.repeat_interleave(scores.shape[0] // values.shape[0], 0)
    return (weights @ values).transpose(0, 1)


def rounding(pieces: Seq[Piece], truth: Seq[torch.Tensor]) -> float:
    """How far a right output may be from `truth`, as an absolute number.

    Four times what the plain formula is off when each of its steps is rounded to the dtype of the
    query, or to float32 where that is wider; and some roundings of the largest output.
    """
    dtype = pieces[0].query.dtype
    narrow = torch.float32 if dtype == torch.float64 else dtype
    worst = largest = 0.0
    for piece, right in zip(pieces, truth, strict=True):
        if not (asked := piece.asked).any():
            continue
        off = (attend(piece, narrow).double() - right)[asked].abs().max()
        worst = max(worst, float(off))
        largest = max(largest, float(right[asked].abs().max()))
    return 4 * worst + 16 * torch.finfo(narrow).eps * largest
