"""What the options of decodings that draft have in common: from when on drafts pay."""

from __future__ import annotations

import math


def check(min_acceptance_rate: float, min_speedup: float) -> None:
    """Raise ValueError where they are no share, or no number of times."""
    if not 0 <= min_acceptance_rate <= 1:
        raise ValueError(
            f"min_acceptance_rate must be a share from 0 to 1, not {min_acceptance_rate}"
        )
    if not 0 <= min_speedup < math.inf:
        raise ValueError(f"min_speedup must be a number of 0 or more, not {min_speedup}")
