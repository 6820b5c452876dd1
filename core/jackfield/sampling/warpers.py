"""The warpers: what shapes the distribution that rows draw from.

Temperature; top-h (Potraghloo et al. 2025, arXiv:2509.02510); top-k (Fan, Lewis and Dauphin 2018,
arXiv:1805.04833); top-p, or nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751); min-p
(Nguyen et al. 2024, arXiv:2407.01082); typical sampling (Meister et al. 2022, arXiv:2202.00666);
epsilon and eta sampling (Hewitt, Manning and Liang 2022, arXiv:2210.15191).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch

from jackfield.contracts import Settings, StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER, Stage, asking, widest

COLDEST = float(torch.finfo(torch.float32).tiny)
_HUNDRED = 100  # tokens at most that top-h keeps, as in transformers


@dataclass(frozen=True)
class Warpers:
    """Temperature, then what narrows, in its order, for the rows of a map that ask for them."""

    temperature: Stage | None
    narrowing: tuple[Stage, ...]

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> Warpers:
        heat = asking(rows, block, divide, lambda s: max(s.temperature, COLDEST), 1.0)
        found = [
            _top_k(rows, block, vocab_size)
            if name == "top_k"
            else asking(rows, block, act, attrgetter(name), inert)
            for name, (act, inert) in NARROWING.items()
        ]
        return cls(heat, tuple(s for s in found if s is not None))

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """All of them, in this order. `scores` `[rows, vocab]` may be changed."""
        return self.narrowed(scores if self.temperature is None else self.temperature(scores))

    def told(self, scores: torch.Tensor) -> torch.Tensor:
        """The same of `scores` `[rows, vocab]`, as transformers returns it: the scores divided by
        the temperature, where those that are drawn from are below the best, which is 0.
        """
        if (heat := self.temperature) is None:
            return self.narrowed(scores)
        best = scores.max(-1, keepdim=True).values
        own, most = heat.pick(best) / heat.values[0], torch.finfo(best.dtype).max
        lift = replace(heat, act=torch.add, values=(own.clamp(-most, most),))
        return lift(self(scores))

    def narrowed(self, scores: torch.Tensor) -> torch.Tensor:
        """All but temperature. `scores` `[rows, vocab]` may be changed."""
        for stage in self.narrowing:
            scores = stage(scores)
        return scores


def divide(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """`scores` `[n, vocab]` below the best of their row, divided by `temperatures` `[n, 1]` > 0.

    Relative to the best score, a tiny temperature tends to greedy instead of inf - inf.
    """
    return (scores - scores.max(-1, keepdim=True).values) / temperatures


def keep_top_k(scores: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """The `counts` (int64 `[n, 1]`, 1 to `most`) best scores of each row; the others are -inf.

    What is as good as the last of them stays too, as with transformers.
    """
    best = scores.topk(most, -1).values
    least = best.gather(1, counts - 1)
    return scores.masked_fill(scores < least, NEVER)


def _top_k(rows: RowMap, block: StepBlock, vocab_size: int) -> Stage | None:
    def count(settings: Settings) -> int:
        return min(settings.top_k or vocab_size, vocab_size)

    asked = {count(rows.sequences[i].settings) for i in rows.owners} - {vocab_size}
    act = partial(keep_top_k, most=max(asked, default=0))
    return asking(rows, block, act, count, vocab_size, torch.long)


def keep_top_h(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The best tokens, of a hundred, whose entropy is at most `shares` (`[n, 1]`) of all of it.

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    # Sorted in full: which of equal scores `topk` takes depends on the rows beside.
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    best = ordered[:, :_HUNDRED]
    logs = best - best.logsumexp(-1, keepdim=True)
    likely = logs.softmax(-1)
    entropies = -(logs.clamp(min=torch.finfo(logs.dtype).min) * likely).sum(-1, keepdim=True)
    # NaN from a token that cannot come on: none of those stays.
    keep = (-likely * likely.log()).cumsum(-1) <= entropies * shares
    keep[:, 0] = True
    drop = torch.ones_like(scores, dtype=torch.bool).scatter(1, order[:, :_HUNDRED], ~keep)
    return scores.masked_fill(drop, NEVER)


def keep_top_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The fewest tokens, best first, that have the probability `shares` (`[n, 1]`, 0 to 1).

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    ordered, order = scores.sort(dim=-1, stable=True)
    # Summed in float64 and rounded, as a CPU does it anyway: a GPU sums float32 in float32, which
    # can keep other tokens of a large vocabulary.
    summed = ordered.softmax(-1).cumsum(-1, dtype=widest(scores.device)).to(ordered.dtype)
    drop = summed <= 1 - shares
    drop[:, -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)


def keep_min_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The tokens with at least `shares` (`[n, 1]`, 0 to 1) of the best one's probability.

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    probabilities = scores.softmax(-1)
    least = shares * probabilities.max(-1, keepdim=True).values
    return scores.masked_fill(probabilities < least, NEVER)


def keep_typical(scores: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Those whose information is closest to the entropy, with `masses` (`[n, 1]`) of probability.

    The other scores of `scores` `[n, vocab]` are -inf. The closest stays.
    """
    logs = scores.log_softmax(-1)
    entropies = -_weighted(logs).sum(-1, keepdim=True)
    distances, order = (-logs - entropies).abs().sort(-1)
    before = (scores.gather(1, order).softmax(-1).cumsum(-1) < masses).sum(-1, keepdim=True)
    last = distances.gather(1, before.clamp(max=scores.shape[-1] - 1))
    drop = distances > last
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)


def keep_likely(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The tokens with at least the probability `least` (`[n, 1]`), and the best ones.

    The other scores of `scores` `[n, vocab]` are -inf.
    """
    rare = (scores.softmax(-1) < least) & (scores < scores.max(-1, keepdim=True).values)
    return scores.masked_fill(rare, NEVER)


def keep_by_entropy(scores: torch.Tensor, cutoffs: torch.Tensor) -> torch.Tensor:
    """Eta sampling: the least probability is lower where the entropy of a row is high.

    `cutoffs` (`[n, 1]`) is epsilon of the paper; the other scores of `scores` `[n, vocab]` are
    -inf. The best stays.
    """
    entropies = -_weighted(scores.log_softmax(-1)).sum(-1, keepdim=True)
    return keep_likely(scores, torch.minimum(cutoffs, cutoffs.sqrt() * (-entropies).exp()))


def _weighted(logs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities times probabilities, 0 where those are 0."""
    return logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)


#: setting -> what it does, and with which value nothing; in the order of transformers.
NARROWING: Mapping[str, tuple[Callable[..., torch.Tensor], float]] = {
    "top_h": (keep_top_h, 0.0),
    "top_k": (keep_top_k, 0),
    "top_p": (keep_top_p, 1.0),
    "min_p": (keep_min_p, 0.0),
    "typical_p": (keep_typical, 1.0),
    "epsilon_cutoff": (keep_likely, 0.0),
    "eta_cutoff": (keep_by_entropy, 0.0),
}
