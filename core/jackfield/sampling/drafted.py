"""What drafts did: for one sequence, or for all of a strategy's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

JUDGED = 8  # rounds over which a strategy is judged
FIRST_REST = 16  # tokens without drafts, where they did not pay
LONGEST_REST = 256  # a rest is twice as long as the one before, up to this


@dataclass(slots=True)
class Drafted:
    """Counts of drafts, and whether they pay.

    `steps` gave `tokens` tokens; of `proposed` drafts `accepted` were right. `pauses` is how often
    the strategy was found not to pay, `resting` for how many tokens it is left alone now.
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    pauses: int = 0
    resting: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=JUDGED))
    _next_rest: int = FIRST_REST

    def count(self, tokens: int, proposed: int, accepted: int) -> None:
        """One step of one sequence."""
        self.steps += 1
        self.tokens += tokens
        self.proposed += proposed
        self.accepted += accepted
        if proposed:
            self._recent.append((accepted, proposed))

    def rest(self, worth: float) -> tuple[int, int] | None:
        """Leave the strategy alone for a while, if less than `worth` of its drafts are right.

        Then returns how many were right, of how many.
        """
        if len(self._recent) < JUDGED:
            return None
        accepted = sum(a for a, _ in self._recent)
        proposed = sum(p for _, p in self._recent)
        if accepted >= worth * proposed:
            self._next_rest = FIRST_REST
            return None
        self.resting, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self.pauses += 1
        self._recent.clear()
        return accepted, proposed

    def rests(self) -> bool:
        """Whether it is left alone for the token that comes now."""
        if not self.resting:
            return False
        self.resting -= 1
        return True
