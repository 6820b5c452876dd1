"""The stages of one step, in their order: from the logits of its rows to a token for each.

Guidance; bias, penalties, minimum length, the request's processors; token mask; temperature, what
narrows the choice (`warpers.NARROWING`), and the draw. The order and what each does follow
transformers' logits processors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import torch

from jackfield.contracts import Settings, StepBlock
from jackfield.sampling import bias, min_length, penalties, token_mask
from jackfield.sampling.bias import Bias
from jackfield.sampling.choosing import WIDE, Choosing, SampledRows
from jackfield.sampling.guidance import guide
from jackfield.sampling.histories import Histories
from jackfield.sampling.penalties import Penalty
from jackfield.sampling.processors import Marked, Outcome, apply_processors, watermarked
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import ScoreStage, Stage, asking, precise
from jackfield.sampling.token_table import TokenTable

#: The tokens that sequences with penalties have, by dtype: whether, and how often generated. Kept
#: from step to step, as long as somebody asks; a pipeline brings them up to date when it is made.
Tables = dict[torch.dtype, TokenTable | Histories]

_NOTHING = Outcome()


@dataclass(frozen=True)
class Settled:
    """Which rows ask for what, as far as settings alone say it: the same in every step.

    `guidance` lacks the logits of the negative prompts. `phrases` and `short` are rows with a bias
    behind other tokens, and with a minimum length; `processed` are sequences with processors of
    their own, or a watermark; of `logprobs` likeliest tokens the log-probabilities are wanted at
    most, None: of no token at all. `told` are rows whose logits or scores go to the caller.
    """

    guidance: Stage | None
    bias: Bias | None
    phrases: tuple[int, ...]
    repetition: Penalty | None
    counted: Penalty | None
    short: tuple[int, ...]
    processed: tuple[int, ...]
    sampled: SampledRows | None
    logprobs: int | None
    told: tuple[int, ...]

    @property
    def blind(self) -> bool:
        """Whether nobody asks which tokens a text has, nor for logits."""
        looking = (self.guidance, self.repetition, self.counted)
        return looking == (None, None, None) and not (self.phrases or self.processed or self.told)

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> Settled:
        biased = rows.asking(lambda s: s.sequence_bias)
        repeating = rows.asking(lambda s: s.repetition_penalty != 1)
        counted = rows.asking(lambda s: s.frequency_penalty or s.presence_penalty)
        sampled = rows.asking(lambda s: s.do_sample)
        wanted = [s.settings.logprobs for s in rows.sequences if s.settings.logprobs is not None]
        return cls(
            asking(rows, block, guide, lambda s: s.guidance_scale, 1.0),
            bias.single_tokens(rows, biased, block) if biased else None,
            tuple(rows.asking(lambda s: any(len(ids) > 1 for ids in s.sequence_bias))),
            penalties.repetition(rows, repeating, block) if repeating else None,
            penalties.counted(rows, counted, block) if counted else None,
            tuple(rows.asking(lambda s: s.min_new_tokens)),
            tuple(i for i, s in enumerate(rows.sequences) if _is_processed(s.settings)),
            SampledRows.of(rows, sampled, block, vocab_size) if sampled else None,
            max(wanted, default=None),
            tuple(rows.asking(lambda s: s.output_logits or s.output_scores)),
        )


@dataclass(frozen=True)
class Pipeline:
    """The stages of the rows of one step. Valid as long as its `rows` are, or it `lasts`.

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
        stages = _stages(rows, settled, {} if tables is None else tables, vocab_size, block)
        block.send()
        return cls(rows, vocab_size, block, settled, stages, choosing)

    @cached_property
    def lasts(self) -> bool:
        """Whether it holds when sequences have grown: each takes the best of its logits."""
        settled = self.settled
        return (
            not self.stages
            and (settled.guidance, settled.sampled) == (None, None)
            and not (settled.phrases or settled.short or settled.processed or settled.told)
        )

    def masked(self, allowed: torch.Tensor | None) -> Pipeline:
        """The same, and rows of requests with a structure have the tokens `allowed` only.

        int32 `[rows with a structure, words]` of the host, a bit a token; None: no row has one.
        """
        if allowed is None:
            return self
        found = token_mask.mask(allowed, self.rows, self.vocab_size, self.block)
        return replace(self, choosing=replace(self.choosing, mask=found))

    def guided(self, led_from: torch.Tensor | None) -> Pipeline:
        """The same, and rows of requests with guidance are led away from these logits, in order.

        float `[rows with guidance, vocab]`; None: no row has guidance.
        """
        stage = self.settled.guidance
        if led_from is None or stage is None:
            return self
        stage = replace(stage, values=(*stage.values, precise(led_from)))
        return replace(self, stages=(stage, *self.stages))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Outcome]:
        """Tokens, int64 `[rows]`; the best processed score of each row; what processors did.

        `logits` `[rows, vocab]` may be changed. The best score is NaN if any score of its row is.
        """
        scores, outcome = self.processed(logits)
        tokens, best = self.choosing(scores)
        outcome.put(tokens, best)
        return tokens, best, outcome

    def processed(self, logits: torch.Tensor) -> tuple[torch.Tensor, Outcome]:
        """The scores that greedy rows take the best of, but for the token mask.

        `logits` `[rows, vocab]` stay as they are; they are returned where no row asks for anything.
        """
        scores = precise(logits)
        for stage in self.stages:
            scores = stage(scores.clone() if stage.in_place and scores is logits else scores)
        if not self.settled.processed:
            return scores, _NOTHING
        scores = scores.clone() if scores is logits else scores
        return scores, apply_processors(
            scores, self.rows, self.settled.processed, self._choose_one, self._mark, self.block
        )

    def _choose_one(self, row: int, scores: torch.Tensor) -> int:
        """The token of one row with these scores, `[1, vocab]`."""
        tokens, _ = self._choosing_of(row)(scores.clone())
        return int(tokens)

    def _mark(self, row: int, scores: torch.Tensor) -> Marked:
        """The same with its watermark, which comes after all else. Raises OwnFailure."""
        choosing = self._choosing_of(row)
        token, best = map(float, choosing(scores.clone()))
        if not isfinite(best):
            return Marked(int(token), best, scores[0])
        shaped = watermarked(self.rows, row, choosing.shaped(scores), self.block)
        return Marked(int(choosing.among(shaped)), best, shaped[0])

    def _choosing_of(self, row: int) -> Choosing:
        """How the token of one row is chosen."""
        rows, mask = self.rows.pick([row]), self.choosing.mask
        asked = rows.asking(lambda s: s.do_sample)
        sampled = SampledRows.of(rows, asked, self.block, self.vocab_size) if asked else None
        choosing = Choosing.of(rows, sampled, self.block)
        self.block.send()
        return replace(choosing, mask=mask and mask.only(row))


def _is_processed(settings: Settings) -> bool:
    return bool(settings.logits_processor) or settings.watermark is not None


def _stages(
    rows: RowMap, settled: Settled, tables: Tables, vocab_size: int, block: StepBlock
) -> tuple[ScoreStage, ...]:
    """What depends on the tokens, too: bias, penalties, minimum length."""
    found: list[ScoreStage | None] = [settled.bias]
    if settled.phrases:
        found.append(bias.phrases(rows, settled.phrases, block))
    asked = ((settled.repetition, torch.bool), (settled.counted, torch.float32))
    for penalty, dtype in asked:
        if penalty is None:
            tables.pop(dtype, None)
            continue
        if dtype not in tables and block.device.type == "cpu" and vocab_size >= WIDE:
            tables[dtype] = Histories(generated=dtype != torch.bool)
        elif dtype not in tables:
            tables[dtype] = TokenTable(vocab_size, dtype, block)
        found.append(penalty.stage(rows, tables[dtype], block))
    if settled.short:
        found.append(min_length.stage(rows, settled.short, block))
    return tuple(stage for stage in found if stage is not None)
