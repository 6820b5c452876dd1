"""What a load's times come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jackfield.client.load import Outcome
from jackfield.client.timing import Timed

SHARES = (50, 95, 99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, with a straight line between neighbours, as numpy's default has it."""
    at = (len(ordered) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p95, p99 and the largest; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{share}": percentile(ordered, share) for share in SHARES}
    return {**found, "max": ordered[-1]}


@dataclass(frozen=True)
class Bounds:
    """When an answer counts as good: seconds to the first token, and for each one after it."""

    to_first: float | None = None
    per_token: float | None = None

    def holds(self, timed: Timed) -> bool:
        if timed.error is not None:
            return False
        if self.to_first is not None and timed.to_first > self.to_first:
            return False
        slow = timed.per_token
        return self.per_token is None or slow is None or slow <= self.per_token


@dataclass(frozen=True)
class Figures:
    """All times in seconds, rates a second.

    `goodput` is the rate of requests that kept the bounds, `gap` the time between two pieces of one
    text, `late` by how much the client sent a request after it was due, `client_share` the part of
    one processor core that the client took. `counted` is False where
    the server did not say how many tokens there were, and pieces of text were counted in their
    place.
    """

    concurrency: int | None
    rate: float | None
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    goodput: float
    tokens: int
    tokens_per_second: float
    counted: bool
    prompt_tokens: dict[str, float] | None
    time_to_first_token: dict[str, float] | None
    time_per_token: dict[str, float] | None
    gap: dict[str, float] | None
    whole: dict[str, float] | None
    late: float
    client_share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(outcome: Outcome, bounds: Bounds) -> Figures:
    good = [one for one in outcome.timed if one.error is None]
    errors = Counter(one.error for one in outcome.timed if one.error is not None)
    seconds = max(outcome.seconds, 1e-9)
    tokens = sum(one.tokens for one in good)
    per_token = (one.per_token for one in good)
    return Figures(
        concurrency=outcome.arrivals.concurrency,
        rate=outcome.arrivals.rate,
        requests=len(outcome.timed),
        failed=errors.total(),
        errors=dict(errors.most_common()),
        seconds=outcome.seconds,
        requests_per_second=len(good) / seconds,
        goodput=sum(map(bounds.holds, outcome.timed)) / seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        counted=all(one.counted for one in good),
        prompt_tokens=spread(one.prompt_tokens for one in good if one.prompt_tokens is not None),
        time_to_first_token=spread(one.to_first for one in good),
        time_per_token=spread(value for value in per_token if value is not None),
        gap=spread(gap for one in good for gap in one.gaps),
        whole=spread(one.whole for one in good),
        late=max((one.sent - one.due for one in outcome.timed), default=0.0),
        client_share=outcome.client_seconds / seconds,
    )
