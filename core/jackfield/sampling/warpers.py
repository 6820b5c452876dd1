"""The warpers: what shapes the distribution that rows draw from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.contracts import StepBlock
from jackfield.sampling import min_p, temperature, top_k, top_p
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Warpers:
    """Temperature, then top-k, top-p and min-p, for the rows of a map that ask for them."""

    temperature: Stage | None
    narrowing: tuple[Stage, ...]

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> Warpers:
        found = (
            top_k.stage(rows, block, vocab_size), top_p.stage(rows, block),
            min_p.stage(rows, block),
        )  # fmt: skip
        return cls(temperature.stage(rows, block), tuple(s for s in found if s is not None))

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """All of them, in this order. `scores` `[rows, vocab]` may be changed."""
        return self.narrowed(scores if self.temperature is None else self.temperature(scores))

    def narrowed(self, scores: torch.Tensor) -> torch.Tensor:
        """All but temperature. `scores` `[rows, vocab]` may be changed."""
        for stage in self.narrowing:
            scores = stage(scores)
        return scores
