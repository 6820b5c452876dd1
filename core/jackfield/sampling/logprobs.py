"""Log-probabilities under the model itself, before any setting is applied."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jackfield.contracts import TokenLogprob
from jackfield.sampling.stage import precise


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """A new tensor of `logits` `[rows, vocab]`, in float32, or in float64 where they are."""
    return torch.log_softmax(precise(logits), -1)


def columns(raw: torch.Tensor, tokens: torch.Tensor, most: int) -> list[torch.Tensor]:
    """`[rows]` each: the token's log-probability, the ids of the `most` likeliest, and theirs.

    `raw` is what `log_probabilities` gave, `tokens` is int64 `[rows]`.
    """
    top = raw.topk(most, -1)
    return [raw.gather(1, tokens[:, None])[:, 0], *top.indices.T, *top.values.T]


def entry(token: int, numbers: Seq[float], wanted: int) -> TokenLogprob:
    """What a request that asked for `wanted` gets; `numbers` are a row of `columns`."""
    most = (len(numbers) - 1) // 2
    pairs = zip(numbers[1 : 1 + wanted], numbers[1 + most : 1 + most + wanted], strict=True)
    return TokenLogprob(token, numbers[0], tuple((int(i), value) for i, value in pairs))
