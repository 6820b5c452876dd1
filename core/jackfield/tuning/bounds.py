"""What tuning may lose and take: quality, and time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from jackfield.errors import UsageError, shown
from jackfield.tuning.candidates import Quality

#: By what share perplexity may rise, and how far the share of right answers may fall, where nobody
#: says.
MAX_RISE, MAX_DROP = 0.02, 0.02

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Bounds:
    """How much worse than auto a selection may be. Raises UsageError for what is no bound."""

    max_rise: float = MAX_RISE
    max_drop: float = MAX_DROP

    def __post_init__(self) -> None:
        for name in ("max_rise", "max_drop"):
            if not getattr(self, name) >= 0:  # also one that is not a number
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be at least 0, not {getattr(self, name)}")

    def reason_against(self, before: Quality, after: Quality) -> str | None:
        """Why a quality is too far below another one; None: it is not."""
        rise = after.perplexity / before.perplexity - 1
        if not round(rise, 9) <= self.max_rise:  # also where it is not a number
            return (
                f"perplexity rises by {rise:.1%}, from {before.perplexity:.4g} to "
                f"{after.perplexity:.4g}; it may by {self.max_rise:.1%}"
            )
        lost = before.right - after.right
        if before.total and round(lost / before.total, 9) > self.max_drop:
            return (
                f"{after.right} of {after.total} answers are right, and {before.right} were; "
                f"{self.max_drop:.1%} may be lost"
            )
        return None


class Budget:
    """So many seconds from now on, by a clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


def parse_seconds(text: str) -> float:
    """Seconds from "90", "90s", "2m" or "1.5h". Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"cannot read --budget {shown(text)!r}: write 90s, 2m or 1h")
    return float(match[1]) * _UNITS[match[2]]
