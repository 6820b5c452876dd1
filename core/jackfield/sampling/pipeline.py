"""The stages of one step, in their order: from the logits of its rows to a token for each.

Bias, penalties, minimum length, the request's processors; token mask; temperature, top-k, top-p,
min-p and the draw. The order and what each does follow transformers' logits processors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from jackfield.contracts import StepBlock
from jackfield.sampling import bias, min_length, penalties, token_mask
from jackfield.sampling.bias import Bias
from jackfield.sampling.choosing import Choosing, SampledRows
from jackfield.sampling.logprobs import most_wanted
from jackfield.sampling.penalties import Penalty
from jackfield.sampling.precision import precise
from jackfield.sampling.processors import Outcome, apply_processors
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import ScoreStage
from jackfield.sampling.token_table import TokenTable


class Tables:
    """The tokens that sequences with penalties have: `seen`, and how often they `generated` each.

    Kept from step to step; a pipeline brings them up to date when it is made.
    """

    def __init__(self, vocab_size: int, block: StepBlock) -> None:
        self.seen = TokenTable(vocab_size, torch.bool, block)
        self.generated = TokenTable(vocab_size, torch.float32, block)


@dataclass(frozen=True)
class Settled:
    """Which rows ask for what, as far as settings alone say it: the same in every step.

    `phrases` and `short` are rows with a bias behind other tokens, and with a minimum length;
    `processed` are sequences with processors of their own; of `logprobs` likeliest tokens the
    log-probabilities are wanted at most, None: of no token at all.
    """

    bias: Bias | None
    phrases: tuple[int, ...]
    repetition: Penalty | None
    counted: Penalty | None
    short: tuple[int, ...]
    processed: tuple[int, ...]
    sampled: SampledRows | None
    logprobs: int | None

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> Settled:
        return cls(
            bias.single_tokens(rows, block),
            tuple(rows.asking(lambda s: any(len(ids) > 1 for ids in s.sequence_bias))),
            penalties.repetition(rows, block),
            penalties.counted(rows, block),
            tuple(rows.asking(lambda s: s.min_new_tokens)),
            tuple(i for i, s in enumerate(rows.sequences) if s.settings.logits_processor),
            SampledRows.of(rows, block, vocab_size),
            most_wanted(rows),
        )


@dataclass(frozen=True)
class Pipeline:
    """The stages of the rows of one step. Valid as long as its `rows` are.

    It changes nothing of itself: the same logits give the same tokens again. What it needs on the
    device is there; only processors, and what `masked` is handed, are sent later.
    """

    rows: RowMap
    vocab_size: int
    block: StepBlock
    settled: Settled
    stages: tuple[ScoreStage, ...]
    choosing: Choosing

    @classmethod
    def of(
        cls,
        rows: RowMap,
        vocab_size: int,
        block: StepBlock,
        tables: Tables | None = None,
        before: Pipeline | None = None,
    ) -> Pipeline:
        """Put what the stages need into `block`, and send it.

        `tables` and the pipeline of the step `before` spare what is known already.
        """
        same = before is not None and before.vocab_size == vocab_size and before.rows.like(rows)
        if before is not None and same and before.block is block:
            settled = before.settled
        else:
            settled = Settled.of(rows, block, vocab_size)
        choosing = Choosing.of(rows, settled.sampled, block)
        stages = _stages(rows, settled, tables or Tables(vocab_size, block), block)
        block.send()
        return cls(rows, vocab_size, block, settled, stages, choosing)

    def masked(self, allowed: torch.Tensor | None) -> Pipeline:
        """The same, and rows of requests with a structure have the tokens `allowed` only.

        int32 `[rows with a structure, words]` of the host, a bit a token; None: no row has one.
        """
        if allowed is None:
            return self
        found = token_mask.mask(allowed, self.rows, self.vocab_size, self.block)
        return replace(self, choosing=replace(self.choosing, mask=found))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Outcome]:
        """Tokens, int64 `[rows]`; the best processed score of each row; what processors did.

        `logits` `[rows, vocab]` may be changed. The best score is NaN if any score of its row is.
        """
        scores, outcome = self.processed(logits)
        return *self.choosing(scores), outcome

    def processed(self, logits: torch.Tensor) -> tuple[torch.Tensor, Outcome]:
        """The scores that greedy rows take the best of, but for the token mask.

        `logits` `[rows, vocab]` stay as they are; they are returned where no row asks for anything.
        """
        scores = precise(logits)
        for stage in self.stages:
            scores = stage(scores.clone() if stage.in_place and scores is logits else scores)
        if not self.settled.processed:
            return scores, Outcome()
        scores = scores.clone() if scores is logits else scores
        return scores, apply_processors(
            scores, self.rows, self.settled.processed, self._choose_one, self.block
        )

    def _choose_one(self, row: int, scores: torch.Tensor) -> int:
        """The token of one row with these scores, `[1, vocab]`."""
        rows, mask = self.rows.pick([row]), self.choosing.mask
        sampled = SampledRows.of(rows, self.block, self.vocab_size)
        choosing = Choosing.of(rows, sampled, self.block)
        self.block.send()
        tokens, _ = replace(choosing, mask=mask and mask.only(row))(scores)
        return int(tokens)


def _stages(
    rows: RowMap, settled: Settled, tables: Tables, block: StepBlock
) -> tuple[ScoreStage, ...]:
    """What depends on the tokens, too: bias, penalties, minimum length."""
    found: list[ScoreStage | None] = [
        settled.bias,
        bias.phrases(rows, settled.phrases, block),
    ]
    for penalty, table in ((settled.repetition, tables.seen), (settled.counted, tables.generated)):
        tokens = table.of(() if penalty is None else penalty.sequences)
        found.append(None if penalty is None else penalty.stage(rows, tokens, block))
    found.append(min_length.stage(rows, settled.short, block))
    return tuple(stage for stage in found if stage is not None)
