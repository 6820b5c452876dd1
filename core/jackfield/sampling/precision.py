"""The number types of the sampler, and the score of a token that must not come."""

from __future__ import annotations

import math

import torch

NEVER = -math.inf


def precise(scores: torch.Tensor) -> torch.Tensor:
    """The same scores in float32, or in float64 where they are; the tensor itself if it is."""
    return scores if scores.dtype == torch.float64 else scores.float()


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64 (float32 holds token ids up to 2²⁴)."""
    return torch.float32 if device.type == "mps" else torch.float64
