"""Logits and scores that go to the caller, as transformers' `output_logits` and `output_scores`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from jackfield.sampling.pipeline import Pipeline

#: row -> its logits and its scores, float32 `[vocab]` each on the CPU.
Shown = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Told:
    """The `rows` of a step that are told of, and their `logits` `[told, vocab]`, a copy."""

    rows: Seq[int]
    index: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def of(cls, pipeline: Pipeline, logits: torch.Tensor) -> Told:
        """Before anything is done to `logits` `[rows, vocab]`."""
        rows = pipeline.settled.told
        index = pipeline.block.put(list(rows), torch.long)
        pipeline.block.send()
        return cls(rows, index, logits.index_select(0, index).float().cpu())

    def by_row(self, scores: torch.Tensor) -> Shown:
        """With what the tokens are chosen by, `[rows, vocab]` of all rows."""
        own = scores.index_select(0, self.index).float().cpu()
        return {row: (self.logits[i], own[i]) for i, row in enumerate(self.rows)}
