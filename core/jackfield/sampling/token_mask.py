"""The token mask: a row of a request with a structure is left with what that allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.contracts import StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER, Stage, indexes
from jackfield.sampling.structured import unpacked

if TYPE_CHECKING:
    import torch


def apply_token_mask(scores: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """`scores` with -inf where `forbidden` is True, `[n, vocab]` both."""
    return scores.masked_fill(forbidden, NEVER)


@dataclass(frozen=True, eq=False)
class TokenMask:
    """`forbidden`: bool `[n, vocab]`, of the rows `asked`."""

    forbidden: torch.Tensor
    asked: tuple[int, ...]
    stage: Stage

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores after it; where only some rows have a structure, `scores` is changed."""
        return self.stage(scores)

    def only(self, row: int) -> TokenMask | None:
        """The mask of a step that has this row alone; None: it may have every token."""
        if row not in self.asked:
            return None
        at = self.asked.index(row)
        own = self.forbidden[at : at + 1]
        return TokenMask(own, (0,), Stage(apply_token_mask, (own,)))


def mask(allowed: torch.Tensor, rows: RowMap, vocab_size: int, block: StepBlock) -> TokenMask:
    """What the bits `allowed` say of the rows of requests with a structure. Sends the block.

    int32 `[n, words]` of the host, a row for each of these rows in their order.
    """
    bits = block.put(allowed)
    asked = rows.asking(lambda s: s.structure is not None)
    at = indexes(asked, len(rows), block)
    block.send()
    forbidden = ~unpacked(bits, vocab_size)
    return TokenMask(forbidden, tuple(asked), Stage(apply_token_mask, (forbidden,), at))
