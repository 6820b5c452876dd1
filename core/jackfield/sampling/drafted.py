"""What drafts did: for one sequence, or for all of a strategy's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

JUDGED = 8  # rounds over which a strategy is judged
FIRST_COOLDOWN = 16  # tokens without drafts, where they did not pay
LONGEST_COOLDOWN = 256  # a cooldown is twice as long as the one before, up to this


@dataclass(slots=True)
class Drafted:
    """Counts of drafts, and whether they pay.

    `steps` gave `tokens` tokens; of `proposed` drafts `accepted` were right. `cooldowns` is how
    often the strategy was found not to pay, `cooldown` for how many tokens it is not asked now.
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    cooldowns: int = 0
    cooldown: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=JUDGED))
    _next_cooldown: int = FIRST_COOLDOWN

    def count(self, tokens: int, proposed: int, accepted: int) -> None:
        """One step of one sequence."""
        self.steps += 1
        self.tokens += tokens
        self.proposed += proposed
        self.accepted += accepted
        if proposed:
            self._recent.append((accepted, proposed))

    def cool_down(self, min_acceptance_rate: float) -> tuple[int, int] | None:
        """Ask the strategy no more for a while, if too few of its drafts are right.

        `min_acceptance_rate`: the share that must be. Returns how many were right, of how many,
        where a cooldown begins.
        """
        if len(self._recent) < JUDGED:
            return None
        accepted = sum(a for a, _ in self._recent)
        proposed = sum(p for _, p in self._recent)
        if accepted >= min_acceptance_rate * proposed:
            self._next_cooldown = FIRST_COOLDOWN
            return None
        self.cooldown = self._next_cooldown
        self._next_cooldown = min(2 * self._next_cooldown, LONGEST_COOLDOWN)
        self.cooldowns += 1
        self._recent.clear()
        return accepted, proposed

    def in_cooldown(self) -> bool:
        """Whether the strategy is not asked for the token that comes now."""
        if not self.cooldown:
            return False
        self.cooldown -= 1
        return True
