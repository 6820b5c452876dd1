"""What the options of decodings that draft have in common: from when on drafts pay."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftOptions:
    """When drafts are made.

    `min_acceptance_rate`: the share of the drafts that must be right, or a request does without for
    a while. `min_speedup`: how many times as fast as without drafts it must be, by the clock, or
    all do without for a while; 0: however slow.
    """

    min_acceptance_rate: float = 0.3
    min_speedup: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_acceptance_rate <= 1:
            raise ValueError(
                f"min_acceptance_rate must be a share from 0 to 1, not {self.min_acceptance_rate}"
            )
        if not 0 <= self.min_speedup < math.inf:
            raise ValueError(f"min_speedup must be a number of 0 or more, not {self.min_speedup}")
