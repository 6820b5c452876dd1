"""The draw: one token for each row, from the distribution that its scores are."""

from __future__ import annotations

import torch

from jackfield.sampling.stage import widest


def draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens, int64 `[n]`, drawn from the softmax of `scores` `[n, vocab]`.

    The cumulative distribution is inverted at `numbers` (`[n, 1]`, from 0 to below 1) in float64,
    or in float32 on a device that has no other.
    """
    cumulative = scores.to(widest(scores.device)).softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return found[:, 0].clamp(max=scores.shape[-1] - 1)
