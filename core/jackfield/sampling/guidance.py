"""Classifier-free guidance (Sanchez et al. 2023, arXiv:2306.17806), as transformers does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def guide(scores: torch.Tensor, scales: torch.Tensor, led_from: torch.Tensor) -> torch.Tensor:
    """Log-probabilities that go `scales` times (`[n, 1]`) as far from those of the negative prompt.

    `scores` and `led_from` are logits, `[n, vocab]` both. 0 gives the negative prompt's own.
    """
    own, other = scores.log_softmax(-1), led_from.log_softmax(-1)
    return scales * (own - other) + other
