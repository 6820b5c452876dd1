"""Is one program slower than another? Intervals of their ratio that assume no distribution.

Times on a shared machine have spikes, so means and standard deviations say little. Of pairs (both
programs in one round, in turn) the interval is Wilcoxon's signed-rank one with the Hodges-Lehmann
estimate: where both programs are the same, the logarithm of their ratio in a round is symmetric
about 0 whatever the noise, which is all that it assumes, and its distribution is exact for any
number of rounds; a bootstrap of ten pairs covers less than it says. Of two runs that were measured
at different times it is that of Mann and Whitney's rank sum.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: How often an interval is wrong at most, and by what share two programs may differ and count as
#: the same, where nobody says.
CONFIDENCE = 0.95
MARGIN = 0.05


class Verdict(StrEnum):
    """What an interval says of a program beside another."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCHANGED = "unchanged"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Change:
    """How many times as long a program takes as another, and from where to where that may be.

    `low` is 0 and `high` infinite where there are too few rounds for an interval. `rounds` are
    those that were compared, of two runs the fewer ones.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    margin: float = MARGIN

    @property
    def verdict(self) -> Verdict:
        """UNCHANGED: the whole interval is within the margin; otherwise by the side of 1 it is on.

        So a difference that is certain but smaller than the margin is none.
        """
        if 1 / (1 + self.margin) <= self.low and self.high <= 1 + self.margin:
            return Verdict.UNCHANGED
        if self.low > 1:
            return Verdict.SLOWER
        return Verdict.FASTER if self.high < 1 else Verdict.UNDECIDED

    @property
    def needed(self) -> int | None:
        """About how many rounds would decide it, as noisy as these are; None: it is decided."""
        if self.verdict is not Verdict.UNDECIDED:
            return None
        if not (self.low > 0 and self.high < math.inf):
            return max(FEWEST, 2 * self.rounds)
        half = (math.log(self.high) - math.log(self.low)) / 2
        off = abs(math.log(self.ratio))
        nearest = max(off, math.log1p(self.margin) - off)
        return max(self.rounds + 1, math.ceil(self.rounds * (half / nearest) ** 2))

    def to_dict(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "low": self.low if self.low > 0 else None,
            "high": self.high if self.high < math.inf else None,
            "rounds": self.rounds,
            "margin": self.margin,
            "verdict": str(self.verdict),
            "rounds_needed": self.needed,
        }


def paired(
    base: Sequence[float],
    other: Sequence[float],
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Change:
    """How many times as long `other` takes as `base`; numbers of the same round are a pair."""
    logs = [math.log(b / a) for a, b in zip(base, other, strict=True)]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(logs, 2))
    return _change(means, _ranks_signed(len(logs)), len(logs), margin, confidence)


def apart(
    base: Sequence[float],
    other: Sequence[float],
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Change:
    """The same of two runs, of which no two numbers belong together."""
    differences = sorted(math.log(b / a) for a in base for b in other)
    weights = _ranks_summed(len(base), len(other))
    return _change(differences, weights, min(len(base), len(other)), margin, confidence)


def _change(
    values: Sequence[float], weights: Sequence[int], rounds: int, margin: float, confidence: float
) -> Change:
    """`values` in order, and in how many of all cases so many of them are on one side of 0."""
    estimate = math.exp(statistics.median(values))
    left, beyond, total = 0, 0, sum(weights)
    for weight in weights:
        beyond += weight
        if beyond > total * (1 - confidence) / 2:
            break
        left += 1
    if not left:
        return Change(estimate, 0.0, math.inf, rounds, margin)
    return Change(estimate, math.exp(values[left - 1]), math.exp(values[-left]), rounds, margin)


@functools.cache
def _ranks_signed(count: int) -> tuple[int, ...]:
    """In how many of the 2^count choices of signs the positive ranks sum to 0, 1, 2, …"""
    ways = [1]
    for rank in range(1, count + 1):
        more = [0] * rank + ways
        ways = [a + b for a, b in itertools.zip_longest(ways, more, fillvalue=0)]
    return tuple(ways)


@functools.cache
def _ranks_summed(one: int, other: int) -> tuple[int, ...]:
    """In how many orders of two samples 0, 1, 2, … pairs are the other way round."""
    ways = [1] + [0] * (one * other)
    for size in range(1, one + 1):  # the Gaussian binomial coefficient, factor by factor
        for at in range(len(ways) - 1, other + size - 1, -1):
            ways[at] -= ways[at - other - size]
        for at in range(size, len(ways)):
            ways[at] += ways[at - size]
    return tuple(ways)


#: The fewest rounds in which an interval of the usual confidence is one at all.
FEWEST = 6
