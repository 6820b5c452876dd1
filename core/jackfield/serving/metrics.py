"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jackfield.serving.pool import Pool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts the tokens of one model, and how long they took."""

    made: Counter
    first: Histogram
    later: Histogram

    def came(self, tokens: int, now: float, before: float | None, began: float) -> None:
        """`tokens` of a text that was asked for at `began`, whose last ones came `before`."""
        self.made.inc(tokens)
        if before is None:
            self.first.observe(now - began)
        else:
            self.later.observe((now - before) / tokens)


class Metrics:
    """Counters of this server alone: a registry of its own, so that two servers do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "jackfield"}
        self._requests = Counter(
            "requests", "Answered requests.", ("endpoint", "model", "status"), **own
        )
        self._tokens = Counter("generated_tokens", "Tokens that were sent.", ("model",), **own)
        self._first = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", ("model",),
            buckets=_SECONDS, **own,
        )  # fmt: skip
        self._later = Histogram(
            "time_per_output_token_seconds", "Between tokens.", ("model",),
            buckets=_TOKEN_SECONDS, **own,
        )  # fmt: skip

        self.unread = Counter(
            "unread_answers", "Connections that were closed since nothing was taken.", **own
        )

    def answered(self, endpoint: str, model: str, status: int) -> None:
        self._requests.labels(endpoint, model, str(status)).inc()

    def tokens_of(self, model: str) -> Tokens:
        """What counts the tokens of one model. To be kept: finding it takes as long as counting."""
        return Tokens(
            self._tokens.labels(model), self._first.labels(model), self._later.labels(model)
        )

    def show(self) -> bytes:
        return generate_latest(self.registry)


class Engines(Collector):
    """What the engines of a pool say of themselves, asked when somebody reads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        shown = {
            "running": ("requests_running", "Requests that run."),
            "waiting": ("requests_waiting", "Requests that wait."),
            "steps": ("steps", "Steps of the engine."),
            "tokens_in": ("prompt_tokens", "Tokens of prompts that came."),
            "tokens_computed": ("computed_tokens", "Tokens that went through the model."),
            "preemptions": ("preemptions", "Requests whose memory was taken."),
        }
        families = {
            key: GaugeMetricFamily(f"jackfield_{name}", text, labels=("model",))
            for key, (name, text) in shown.items()
        }
        pages = GaugeMetricFamily(
            "jackfield_cache_pages", "Pages of the cache.", labels=("model", "state")
        )
        hits = GaugeMetricFamily(
            "jackfield_prefix_hit_rate", "Share of prompt tokens found.", labels=("model",)
        )
        ready = GaugeMetricFamily("jackfield_ready", "1: it takes requests.", labels=("model",))
        for name, served in self._pool.models.items():
            engine = served.engine
            ready.add_metric([name], 0.0 if engine is None else float(engine.health().ready))
            if engine is None:
                continue
            seen = engine.statistics()
            for key, family in families.items():
                family.add_metric([name], getattr(seen, key))
            if (cache := seen.cache) is not None:
                for state in ("pages_used", "pages_kept", "pages"):
                    if (count := getattr(cache, state)) is not None:
                        pages.add_metric([name, state], count)
                hits.add_metric([name], seen.prefix_hit_rate)
        yield from (*families.values(), pages, hits, ready)
