"""Asks a search (such as `beam`) with which beams its requests go on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from jackfield.contracts import Decision, StepBlock
from jackfield.engine.checked_search import CheckedSearch
from jackfield.engine.sequences import RunningGroup
from jackfield.engine.steps import ScheduledRunning
from jackfield.sampling.pipeline import Pipeline
from jackfield.sampling.rows import RowMap

_COLDEST = 1e-30


class Searcher:
    """Scores what may follow each beam, as transformers does, and lets `strategies` decide.

    transformers (`GenerationMixin._beam_search`): log-probabilities in float32, whatever the
    model's dtype; then the processors, on log-probabilities and not on logits, and where a request
    samples the warpers. Nothing is normalized again, but where `renormalize_logits` asks for it.
    `CheckedSearch` adds the score of the beam.
    """

    def __init__(self, strategies: Mapping[str, CheckedSearch]) -> None:
        self.strategies = strategies

    def decide(
        self,
        scheduled: Seq[ScheduledRunning],
        logits: torch.Tensor,
        allowed: torch.Tensor | None,
        block: StepBlock,
    ) -> list[tuple[RunningGroup, Decision]]:
        """What each group does that has all its beams in `scheduled`.

        `logits` is `[scheduled, vocab]`; `allowed` has the bits of the tokens that may come (int32
        `[rows, words]`), for sequences with a constraint only. What goes to the
        device goes by `block`.
        """
        groups = list(dict.fromkeys(item.sequence.group for item in scheduled))
        at = {item.sequence.id: row for row, item in enumerate(scheduled)}
        rows = RowMap.verifying([item.sequence for item in scheduled])
        pipeline = Pipeline.of(rows, logits.shape[-1], block).masked(allowed)
        scores, outcome = pipeline.processed(torch.log_softmax(logits.float(), -1))
        if pipeline.choosing.mask is not None:
            scores = pipeline.choosing.mask(scores)
        scores = _normalized(rows, _warped(pipeline, scores), block)
        found: list[tuple[RunningGroup, Decision]] = []
        for name, strategy in self.strategies.items():
            own = [g for g in groups if g is not None and g.settings.decoding == name]
            if own:
                beams = [[at[beam.id] for beam in group.beams] for group in own]
                every = block.put([row for of_group in beams for row in of_group])
                block.send()
                parts = scores.index_select(0, every).split([len(one) for one in beams])
                found += zip(own, strategy.decide(own, parts), strict=True)
        failed = {scheduled[row].sequence.group: why for row, why in outcome.failures.items()}
        return [(g, _unless(failed.get(g) or g.error, decision)) for g, decision in found]


def _warped(pipeline: Pipeline, scores: torch.Tensor) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, in the rows of requests that sample. Changes `scores`.

    Of each beam as many tokens stay as end a text, and one more (`_get_logits_processor` of
    transformers), so that a search can go on.
    """
    sampled = pipeline.settled.sampled
    if sampled is None:
        return scores
    cooled = sampled.pick(scores)
    if sampled.warpers.temperature is not None:
        cooled = replace(sampled.warpers.temperature, act=_divide)(cooled)
    owners = [pipeline.rows.sequences[pipeline.rows.owners[row]] for row in sampled.asked]
    ends = [len(s.settings.eos_token_ids) for s in owners]
    least = [min(max(2, 1 + n), pipeline.vocab_size) for n in ends]
    last = pipeline.block.put([[n - 1] for n in least])
    pipeline.block.send()
    floor = cooled.topk(max(least)).values.gather(1, last)
    narrowed = sampled.warpers.narrowed(cooled.clone())
    return sampled.put(scores, torch.where(cooled >= floor, cooled, narrowed))


def _normalized(rows: RowMap, scores: torch.Tensor, block: StepBlock) -> torch.Tensor:
    """Log-probabilities again, in the rows of requests that ask for it. Changes `scores`."""
    asked = rows.asking(lambda s: s.renormalize_logits)
    if not asked:
        return scores
    own = block.put(list(asked))
    block.send()
    return scores.index_copy_(0, own, scores.index_select(0, own).log_softmax(-1))


def _divide(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """So that sums of scores stay in the range of float32."""
    return scores / temperatures.clamp(min=_COLDEST)


def _unless(error: str | None, decision: Decision) -> Decision:
    return decision if error is None else Decision(error=error)
