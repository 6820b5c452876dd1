"""The sampler: the next token of each row, each by its own request's settings, vectorized.

A sequence that is fed drafts has one row for each of them and one more: row j asks what follows
its tokens and its first j drafts. So one call says what plain decoding would have said at every
position for which the drafts hold, and verifying them is comparing (`verification.gains`).

Which row belongs to what is a `RowMap`, what is done to it a `Pipeline` of stages. Random numbers
are keyed by (seed, sample, position), so neither batch-mates nor drafts change them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from jackfield.contracts import Accepted, Sequence, StepBlock
from jackfield.sampling import logprobs
from jackfield.sampling.pipeline import Pipeline, Tables
from jackfield.sampling.processors import Outcome
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import widest
from jackfield.sampling.told import Told
from jackfield.sampling.verification import gains


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """What was chosen, on its way to the host: `tokens`, int64 `[rows]`, are on the device."""

    tokens: torch.Tensor
    _block: StepBlock
    _rows: RowMap
    _numbers: Callable[[], Seq[Seq[float]]]
    _outcome: Outcome
    _told: Told | None

    def of(self, rows: Seq[int]) -> torch.Tensor:
        """The tokens of these rows in this order, int64 `[rows]`, on the device."""
        if list(rows) == list(range(len(self.tokens))):
            return self.tokens
        index = self._block.put(list(rows), torch.long)
        self._block.send()
        return self.tokens.index_select(0, index)

    def gains(self) -> list[Accepted]:
        """What each sequence gains. Waits until the device has come so far."""
        chosen = self._numbers()
        shown = {} if self._told is None else self._told.by_row()
        return gains(self._rows, chosen, self._outcome, shown)


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

    @property
    def blind(self) -> bool:
        """Whether the rows of the last call need no token that it chose, to choose the next ones.

        That is so where nothing is looked up in what a text has so far.
        """
        return self._pipeline is not None and self._pipeline.settled.blind

    def expect(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> None:
        """Send what the next `choose` of these needs, before its logits are computed.

        Nothing before the first call of `choose`, which tells the device and the vocabulary.
        """
        if self._vocab_size is not None and self._block is not None and sequences:
            self._pipeline_of(sequences, drafts, self._vocab_size, self._block)

    def choose(
        self,
        sequences: Seq[Sequence],
        logits: torch.Tensor,
        drafts: Seq[Seq[int]] | None = None,
        allowed: torch.Tensor | None = None,
        led_from: torch.Tensor | None = None,
    ) -> ChosenTokens:
        """Have the device choose a token for each row, and tell it to the host.

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
            told = told.chosen_by(outcome.shown(pipeline.choosing.shaped(scores, told=True)))
        tokens, best = pipeline.choosing(scores)
        outcome.put(tokens, best)
        columns = [tokens, best]
        if raw is not None and most is not None:
            columns += logprobs.columns(raw, tokens, most)
        return ChosenTokens(tokens, block, pipeline.rows, _leaving(columns), outcome, told)

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
        if last is not None and last.rows.fits(sequences, drafts, grown=last.lasts):
            return last
        rows = RowMap.verifying(sequences, drafts)
        self._pipeline = Pipeline.of(rows, vocab_size, block, self._tables, last)
        return self._pipeline


def _leaving(columns: Seq[torch.Tensor]) -> Callable[[], Seq[Seq[float]]]:
    """What waits for the numbers of each row, of `columns` `[rows]` each: one copy of a device."""
    device = columns[0].device
    if device.type == "cpu":
        found: Seq[Seq[float]] = list(zip(*[column.tolist() for column in columns], strict=True))
        return lambda: found
    wide = widest(device)
    there = torch.stack([column.to(wide) for column in columns], 1)
    if device.type != "cuda":
        return there.tolist
    here = there.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()  # what the device is told from now on is not waited for
    copied.record(torch.cuda.current_stream(device))

    def numbers() -> Seq[Seq[float]]:
        copied.synchronize()
        told: Seq[Seq[float]] = here.tolist()
        return told

    return numbers
