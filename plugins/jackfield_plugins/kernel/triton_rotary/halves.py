"""Which of the ways in which models rotate it is."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def turns_halves(function: Any) -> bool:
    """Whether `function(q, k, cos, sin)` turns the first half of a head against the second.

    Where there are cosines for a part of a head, the rest of it must stay as it is, unless such are
    not taken. Others turn neighbours (GPT-J, Cohere). It is called with a few numbers.
    """
    return _turns_halves(function, 8) is True and _turns_halves(function, 4) is not False


def _turns_halves(function: Any, part: int) -> bool | None:
    """Of the first `part` numbers of eight; None: it takes or returns something else."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 2, 8), (1, 2, 2, 8), (1, 2, part), (1, 2, part))
    q, k, cos, sin = (
        torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in shapes
    )
    try:
        found = function(q, k, cos, sin)
        pairs = list(zip(found, (q, k), strict=True))
        return all(torch.allclose(new, turned(old, cos, sin)) for new, old in pairs)
    except Exception:  # noqa: BLE001 - whoever wrote the model decides what it raises
        return None


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`states` `[batch, heads, tokens, size]` by angles `[batch, tokens, turned]`.

    Su et al. 2021 (arXiv:2104.09864), as GPT-NeoX and Llama pair the numbers of a head.
    """
    part, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = part.chunk(2, -1)
    crossed = torch.cat((-second, first), -1)
    return torch.cat((part * cos[:, None] + crossed * sin[:, None], rest), -1)
