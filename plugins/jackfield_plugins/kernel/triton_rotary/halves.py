"""Which of the ways in which models rotate it is."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def turns_halves(function: Any) -> bool:
    """Whether `function(q, k, cos, sin)` turns the first half of a head against the second.

    Others turn neighbours (GPT-J, Cohere), or a part of a head. It is called with a few numbers.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 2, 8), (1, 2, 2, 8), (1, 2, 8), (1, 2, 8))
    q, k, cos, sin = (
        torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in shapes
    )
    try:
        found = function(q, k, cos, sin)
        pairs = list(zip(found, (q, k), strict=True))
        return all(torch.allclose(new, turned(old, cos, sin)) for new, old in pairs)
    except (TypeError, ValueError, RuntimeError):  # it takes or returns something else
        return False


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`states` `[batch, heads, tokens, size]` by angles `[batch, tokens, size]`.

    Su et al. 2021 (arXiv:2104.09864), as GPT-NeoX and Llama pair the numbers of a head.
    """
    first, second = states.chunk(2, -1)
    crossed = torch.cat((-second, first), -1)
    return states * cos[:, None] + crossed * sin[:, None]
