"""Random numbers from keys: whoever knows the key draws the same number, on any device."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) from a key: three rounds of splitmix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for word in (seed, sample, position):
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53
