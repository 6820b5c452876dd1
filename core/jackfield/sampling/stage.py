"""A stage: what is done to the scores of the rows whose settings ask for it, and to no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from jackfield.contracts import Settings, StepBlock
from jackfield.sampling.rows import RowMap

NEVER = -math.inf  # the score of a token that must not come


class ScoreStage(Protocol):
    """Anything that makes scores of scores, float `[rows, vocab]` both."""

    @property
    def in_place(self) -> bool:
        """Whether a call changes the scores that it is handed, and returns them."""

    def __call__(self, scores: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Stage:
    """`act(scores, *values)` for the rows that ask.

    `act` is handed the scores of these rows, float `[n, vocab]`, and `values`, `[n, 1]` or
    `[n, vocab]` each. It returns new scores of the same shape and dtype and changes nothing.
    `rows`: int64 `[n]` on the device of the scores; None: every row asks.
    """

    act: Callable[..., torch.Tensor]
    values: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None = None

    @property
    def in_place(self) -> bool:
        """Whether a call changes the scores that it is handed: where only some rows ask."""
        return self.rows is not None

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """Those of the rows that ask."""
        return scores if self.rows is None else scores.index_select(0, self.rows)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores after this stage, `[rows, vocab]` of all rows."""
        if self.rows is None:
            return self.act(scores, *self.values)
        changed = self.act(self.pick(scores), *self.values)
        return scores.index_copy_(0, self.rows, changed)


def asking(
    rows: RowMap,
    block: StepBlock,
    act: Callable[..., torch.Tensor],
    value: Callable[[Settings], float],
    inert: float,
    dtype: torch.dtype = torch.float32,
) -> Stage | None:
    """The stage for the rows with another `value` than the `inert` one; None: there are none.

    Its tensors are put into `block`: they are there after the next `send`.
    """
    values = [value(s.settings) for s in rows.sequences]
    asked = [row for row, i in enumerate(rows.owners) if values[i] != inert]
    if not asked:
        return None
    column = block.put([[values[rows.owners[row]]] for row in asked], dtype)
    return Stage(act, (column,), indexes(asked, len(rows), block))


def indexes(asked: Seq[int], count: int, block: StepBlock) -> torch.Tensor | None:
    """The numbers `asked`, put into `block`; None: they are all from 0 to `count` - 1."""
    return None if len(asked) == count else block.put(list(asked), torch.long)


def places(pairs: Seq[tuple[int, int]], block: StepBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens, to index scores by; put into `block`."""
    both = block.put([[row for row, _ in pairs], [token for _, token in pairs]], torch.long)
    return both[0], both[1]


def precise(scores: torch.Tensor) -> torch.Tensor:
    """The same scores in float32, or in float64 where they are; the tensor itself if it is."""
    return scores if scores.dtype == torch.float64 else scores.float()


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64 (float32 holds token ids up to 2²⁴)."""
    return torch.float32 if device.type == "mps" else torch.float64
