"""Random numbers from keys: the same key gives the same number, on any device.

splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195): a counter grows by a constant,
and its value is mixed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIXED = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) from a key: `seed`, `sample` and `position`, each of which is mixed in."""
    return (_state(seed, sample, position) >> 11) * 2.0**-53


def uniforms(keys: Seq[tuple[int, int, int]]) -> torch.Tensor:
    """What `uniform` says for each of `keys`, float64 `[keys]` on the host; for many of them."""
    import numpy as np
    import torch

    words = np.array([[word & _MASK for word in key] for key in keys], np.uint64).T
    state = np.zeros(len(keys), np.uint64)
    for word in words:  # uint64 wraps, as `& _MASK` does
        state = state + word + np.uint64(_STEP)
        for shift, factor in _MIXED:
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def gumbel(seed: int, position: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers from the standard Gumbel distribution.

    Args:
        seed: The request's.
        position: The place in the text for which they are drawn.
        count: How many. Fewer are the first ones of more.
        device: Where they are made.

    Returns:
        float64 `[count]`, or float32 on a device that has no other.
    """
    import torch

    wide = torch.float32 if device.type == "mps" else torch.float64
    bits = 24 if wide is torch.float32 else 53
    numbers = torch.arange(1, count + 1, device=device)
    words = numbers * _signed(_STEP) + _signed(_state(seed, 0, position))
    for shift, factor in _MIXED:
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    words = words ^ _shifted(words, 31)
    # One bit less than there are, and a half, is never 0 or 1.
    uniforms = (_shifted(words, 65 - bits).to(wide) + 0.5) * 2.0 ** (1 - bits)
    return -(-uniforms.log()).log()


def _state(*words: int) -> int:
    state = 0
    for word in words:
        state = (state + (word & _MASK) + _STEP) & _MASK
        for shift, factor in _MIXED:
            state = ((state ^ (state >> shift)) * factor) & _MASK
        state ^= state >> 31
    return state


def _signed(word: int) -> int:
    """The int64 that has these 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """int64 words shifted to the right as if they had no sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)
