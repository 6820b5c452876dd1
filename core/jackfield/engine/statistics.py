"""The engine's statistics: counted by the loop, shown as an object and as a log line."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackfield.contracts import CacheUsage
    from jackfield.engine.sequences import RunningSequence
    from jackfield.engine.speculation import Speculation
    from jackfield.engine.steps import Event, RunningStep

REMEMBERED = 1000  # requests whose times count


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What an engine has done since it was made, and what it is doing now.

    `tokens_in` are the prompt tokens of the requests that came, `tokens_computed` those that went
    through the model (less what was found in the cache, more what was computed again after a
    preemption), `tokens_out` the new ones. `finished` counts requests by their finish reason. Times
    are medians over the last 1000 requests, in seconds; None before the first. `speculation` is
    what drafts did; None where no decoding drafts.
    """

    running: int
    waiting: int
    steps: int
    finished: Mapping[str, int]
    tokens_in: int
    tokens_computed: int
    tokens_out: int
    preemptions: int
    time_to_first_token: float | None
    time_per_token: float | None
    cache: CacheUsage | None
    speculation: Speculation | None = None

    @property
    def prefix_hit_rate(self) -> float:
        """The share of prompt tokens that were found in the cache."""
        if self.cache is None or not self.cache.prompt_tokens:
            return 0.0
        return self.cache.prefix_tokens / self.cache.prompt_tokens

    def to_dict(self) -> dict[str, Any]:
        drafts = self.speculation and self.speculation.to_dict()
        return asdict(self) | {"prefix_hit_rate": self.prefix_hit_rate, "speculation": drafts}

    def __str__(self) -> str:
        parts = [
            f"{self.running} running, {self.waiting} waiting",
            f"{sum(self.finished.values())} finished",
            f"{self.tokens_in} tokens in, {self.tokens_out} out, {self.steps} steps",
        ]
        if self.cache is not None:
            c = self.cache
            parts.append(f"pages {c.pages_used} used, {c.pages_kept} kept, of {c.pages}")
            parts.append(f"prefix hits {self.prefix_hit_rate:.0%}, {self.preemptions} preemptions")
            if c.not_swapped:
                parts.append(f"{c.not_swapped} preempted without room in host memory")
        if self.speculation is not None:
            parts.append(str(self.speculation))
        if self.time_to_first_token is not None:
            parts.append(f"first token after {self.time_to_first_token:.3f} s")
        if self.time_per_token is not None:
            parts.append(f"then {self.time_per_token * 1000:.1f} ms a token")
        return "; ".join(parts)


class Metrics:
    """Counts what the loop does."""

    def __init__(self) -> None:
        self.tokens_in = 0
        self.tokens_computed = 0
        self.tokens_out = 0
        self.preemptions = 0
        self.finished: Counter[str] = Counter()
        self._first: deque[float] = deque(maxlen=REMEMBERED)
        self._later: deque[float] = deque(maxlen=REMEMBERED)

    def began(self, step: RunningStep) -> None:
        """The model computes a step, whoever gains by it."""
        self.tokens_computed += sum(item.num_tokens + len(item.drafts) for item in step.scheduled)

    def count(self, events: Seq[Event]) -> None:
        """One step, after its tokens were taken."""
        now = time.perf_counter()
        for event in events:
            self.tokens_out += len(event.tokens)
            if event.tokens and event.sequence.first_token_at is None:
                event.sequence.first_token_at = now
                self._first.append(now - event.sequence.started)

    def ended(self, sequences: Seq[RunningSequence]) -> None:
        now = time.perf_counter()
        for sequence in sequences:
            self.finished[sequence.finish_reason or "error"] += 1
            if sequence.first_token_at is not None and sequence.num_new > 1:
                self._later.append((now - sequence.first_token_at) / (sequence.num_new - 1))

    def times(self) -> tuple[float | None, float | None]:
        """Medians of the time to the first token and of the time per later token, in seconds."""
        first, later = list(self._first), list(self._later)
        return (
            median(first) if first else None,
            median(later) if later else None,
        )
