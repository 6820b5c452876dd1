"""The sampler: the next token of each row, each by its own request's settings, vectorized.

A sequence that is fed drafts has one row for each of them and one more: row j asks what follows
its tokens and its first j drafts. So one call says what plain decoding would have said at every
position for which the drafts hold, and verifying them is comparing (`verification.gains`).

Which row belongs to what is a `RowMap`, what is done to it a `Pipeline` of stages. Random numbers
are keyed by (seed, sample, position), so neither batch-mates nor drafts change them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jackfield.contracts import Accepted, Sequence, StepBlock
from jackfield.sampling import logprobs
from jackfield.sampling.pipeline import Pipeline, Tables
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import widest
from jackfield.sampling.told import Told
from jackfield.sampling.verification import gains


class Sampler:
    """Chooses tokens for sequences. Keeps between steps what stays the same."""

    def __init__(self) -> None:
        self._block: StepBlock | None = None
        self._tables: Tables = {}
        self._pipeline: Pipeline | None = None
        self._vocab_size: int | None = None  # of the last logits

    def rest(self) -> None:
        """Nobody is left: keep nothing of those who were."""
        self._pipeline = None
        self._tables.clear()

    def block(self, device: torch.device) -> StepBlock:
        """By what the numbers of a step go to `device`."""
        if self._block is None or self._block.device != device:
            self._block, self._tables, self._pipeline = StepBlock(device), {}, None
        return self._block

    @property
    def sends(self) -> bool:
        """Whether anything is won by `expect`: not before the first batch, and not on a CPU."""
        return self._vocab_size is not None and self._block is not None and self._block.stages

    def expect(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> None:
        """Send what the next `sample` of these needs, before its logits are computed.

        Nothing before the first call of `sample`, which tells the device and the vocabulary.
        """
        if self._vocab_size is not None and self._block is not None and sequences:
            self._pipeline_of(sequences, drafts, self._vocab_size, self._block)

    def sample(
        self,
        sequences: Seq[Sequence],
        logits: torch.Tensor,
        drafts: Seq[Seq[int]] | None = None,
        allowed: torch.Tensor | None = None,
        led_from: torch.Tensor | None = None,
    ) -> list[Accepted]:
        """What each sequence gains: its next token, and after each draft that was right, another.

        `logits` is `[rows, vocab]` and may be modified: `1 + len(drafts[i])` rows in a row for
        sequence i. `allowed` has the bits of the tokens that may come (int32 `[rows, words]`), for
        the rows of the requests with a structure only; `led_from` has the logits behind negative
        prompts, `[rows with guidance, vocab]`. One device-to-host copy, and one for each draft of a
        request with processors of its own.
        """
        block, self._vocab_size = self.block(logits.device), logits.shape[-1]
        pipeline = self._pipeline_of(sequences, drafts, self._vocab_size, block)
        pipeline = pipeline.masked(allowed).guided(led_from)
        most = pipeline.settled.logprobs
        raw = None if most is None else logprobs.log_probabilities(logits)
        told = Told.of(pipeline, logits) if pipeline.settled.told else None
        scores, outcome = pipeline.processed(logits)
        if told is not None:
            told = told.chosen_by(outcome.shown(pipeline.choosing.shaped(scores)))
        tokens, best = pipeline.choosing(scores)
        outcome.put(tokens, best)
        columns = [tokens, best]
        if raw is not None and most is not None:
            columns += logprobs.columns(raw, tokens, most)
        chosen = _on_host(columns)
        shown = {} if told is None else told.by_row()
        return gains(pipeline.rows, chosen, outcome, shown)

    def _pipeline_of(
        self,
        sequences: Seq[Sequence],
        drafts: Seq[Seq[int]] | None,
        vocab_size: int,
        block: StepBlock,
    ) -> Pipeline:
        """The pipeline of these, made anew where it is not that of the last call."""
        last = self._pipeline
        if last is not None and last.vocab_size != vocab_size:
            last = None
            self._tables.clear()
        if last is not None and last.rows.fits(sequences, drafts):
            return last
        rows = RowMap.verifying(sequences, drafts)
        self._pipeline = Pipeline.of(rows, vocab_size, block, self._tables, last)
        return self._pipeline


def _on_host(columns: Seq[torch.Tensor]) -> Seq[Seq[float]]:
    """The numbers of each row, of `columns` `[rows]` each, in one copy from a device."""
    if columns[0].device.type == "cpu":
        return list(zip(*[column.tolist() for column in columns], strict=True))
    wide = widest(columns[0].device)
    found: Seq[Seq[float]] = torch.stack([column.to(wide) for column in columns], 1).tolist()
    return found
