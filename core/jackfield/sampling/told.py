"""Logits and scores that go to the caller, as transformers' `output_logits` and `output_scores`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from jackfield.sampling.pipeline import Pipeline

#: row -> its logits and its scores, float32 `[vocab]` each on the CPU.
Shown = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Told:
    """The `rows` of a step that are told of, and their `logits` `[told, vocab]`, a copy.

    Scores of `normalized` rows are log-probabilities again, as `renormalize_logits` asks.

    From a GPU they and the scores are on their way to the host: they are there when somebody has
    waited for what the device was told later.
    """

    rows: Seq[int]
    index: torch.Tensor
    logits: torch.Tensor
    normalized: frozenset[int]
    scores: torch.Tensor | None = None

    @classmethod
    def of(cls, pipeline: Pipeline, logits: torch.Tensor) -> Told:
        """Before anything is done to `logits` `[rows, vocab]`."""
        rows = pipeline.settled.told
        index = pipeline.block.put(list(rows), torch.long)
        pipeline.block.send()
        normalized = pipeline.rows.asking(lambda s: s.renormalize_logits)
        return cls(rows, index, _leaving(logits, index), frozenset(normalized))

    def chosen_by(self, scores: torch.Tensor) -> Told:
        """With what the tokens are chosen by, `[rows, vocab]` of all rows."""
        return replace(self, scores=_leaving(scores, self.index))

    def by_row(self) -> Shown:
        """Once somebody has waited, and `chosen_by` was called."""
        assert self.scores is not None
        logits, scores = self.logits, self.scores
        if self.index.is_cuda:  # page-locked memory is for what is on its way
            logits, scores = logits.clone(), scores.clone()
        return {
            row: (logits[i], scores[i].log_softmax(-1) if row in self.normalized else scores[i])
            for i, row in enumerate(self.rows)
        }


def _leaving(numbers: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return numbers.index_select(0, index).float().to("cpu", non_blocking=True)
