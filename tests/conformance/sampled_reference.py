"""The sampler as it was before it chose candidates: every stage over whole rows, one row at a time.

Kept as it was, with tables of the whole vocabulary and full sorts: what it draws is what must be
drawn. Bias, structures and processors are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from transformers.generation import logits_process as P

from jackfield.contracts import Sequence, Settings
from jackfield.contracts.counter_rng import uniform


def token(sequence: Sequence, drafts: Seq[int], logits: torch.Tensor) -> int:
    """What follows the tokens of `sequence` and `drafts`, by `logits` `[vocab]`."""
    settings = sequence.settings
    scores = (logits if logits.dtype == torch.float64 else logits.float())[None]
    scores = penalized(scores, settings, sequence, drafts)
    if not settings.do_sample:
        return int(scores.max(-1).indices)
    scores = warped(scores, settings)
    cumulative = scores.double().softmax(-1).cumsum(-1)
    number = uniform(settings.seed, sequence.sample, len(sequence.tokens) + len(drafts))
    wanted = torch.tensor([[number]], dtype=torch.float64) * cumulative[:, -1:]
    return int(torch.searchsorted(cumulative, wanted, right=True).clamp(max=scores.shape[-1] - 1))


def column(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float32)


def penalized(
    scores: torch.Tensor, settings: Settings, sequence: Sequence, drafts: Seq[int]
) -> torch.Tensor:
    if settings.repetition_penalty != 1:
        penalty = column(settings.repetition_penalty)
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        seen[0, [*sequence.tokens, *drafts]] = True
        scaled = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen, scaled, scores)
    if settings.frequency_penalty or settings.presence_penalty:
        counts = torch.zeros(scores.shape, dtype=torch.float32)
        for generated in [*sequence.tokens[sequence.prompt_length :], *drafts]:
            counts[0, generated] += 1
        frequency, presence = column(settings.frequency_penalty), column(settings.presence_penalty)
        scores = scores - counts * frequency - (counts > 0) * presence
    return scores


def warped(scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    never, size = -torch.inf, scores.shape[-1]
    if (heat := max(settings.temperature, torch.finfo(torch.float32).tiny)) != 1:
        scores = (scores - scores.max(-1, keepdim=True).values) / column(heat)
    if settings.top_h:
        order = scores[0].sort(descending=True, stable=True).indices  # equals: the first ones
        filtered = P.TopHLogitsWarper(column(settings.top_h).item())(None, scores[:, order])
        kept = order[: int((filtered > never).sum())]
        scores = torch.full_like(scores, never).index_copy(1, kept, scores[:, kept])
    if (count := min(settings.top_k or size, size)) < size:
        best = scores.topk(count, -1).values
        scores = scores.masked_fill(scores < best[:, -1:], never)
    if settings.top_p != 1:
        ordered, order = scores.sort(dim=-1, stable=True)
        summed = ordered.softmax(-1).cumsum(-1, dtype=torch.float64).to(ordered.dtype)
        drop = summed <= 1 - column(settings.top_p)
        drop[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), never)
    if settings.min_p:
        probabilities = scores.softmax(-1)
        least = column(settings.min_p) * probabilities.max(-1, keepdim=True).values
        scores = scores.masked_fill(probabilities < least, never)
    if settings.typical_p != 1:
        scores = P.TypicalLogitsWarper(column(settings.typical_p).item())(None, scores)
    if settings.epsilon_cutoff:
        scores = P.EpsilonLogitsWarper(column(settings.epsilon_cutoff).item())(None, scores)
    if settings.eta_cutoff:
        scores = P.EtaLogitsWarper(column(settings.eta_cutoff).item())(None, scores)
    return scores
