"""The token mask: a row of a request with a structure is left with what that allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from jackfield.contracts import StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER, Stage, indexes
from jackfield.sampling.structured import unpacked

#: Of each byte of a mask, the ceilings of its eight tokens.
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.nan),
    np.float32(NEVER),
)


def apply_token_mask(scores: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """`scores` with -inf where `forbidden` is True, `[n, vocab]` both."""
    return scores.masked_fill(forbidden, NEVER)


def apply_ceilings(scores: torch.Tensor, ceilings: torch.Tensor) -> torch.Tensor:
    """The same on a CPU, in a twentieth of the time: `ceilings` are -inf there, and NaN elsewhere.

    numpy's `fmin` takes the one of two numbers that is not NaN.
    """
    return torch.from_numpy(np.fmin(scores.detach().numpy(), ceilings.numpy()))


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The `stage` for the rows `asked`; its one value has a row for each of them."""

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
        own = self.stage.values[0][at : at + 1]
        return TokenMask((0,), Stage(self.stage.act, (own,)))


def mask(allowed: torch.Tensor, rows: RowMap, vocab_size: int, block: StepBlock) -> TokenMask:
    """What the bits `allowed` say of the rows of requests with a structure. Sends the block.

    int32 `[n, words]` of the host, a row for each of these rows in their order.
    """
    asked = rows.asking(lambda s: s.structure is not None)
    at = indexes(asked, len(rows), block)
    if block.device.type == "cpu":
        octets = allowed.numpy().astype("<i4", copy=False).view(np.uint8)
        ceilings = _CEILINGS.take(octets, axis=0).reshape(len(octets), -1)[:, :vocab_size]
        return TokenMask(tuple(asked), Stage(apply_ceilings, (torch.from_numpy(ceilings),), at))
    bits = block.put(allowed)
    block.send()
    return TokenMask(tuple(asked), Stage(apply_token_mask, (~unpacked(bits, vocab_size),), at))
