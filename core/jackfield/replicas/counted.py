"""What all replicas count, in one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

#: What is counted in front of all replicas, once for each request.
_IN_FRONT = ("jackfield_requests", "jackfield_unread_answers")


def merged(front: bytes, replicas: Mapping[str, bytes]) -> bytes:
    """Requests as they are counted in front, all else with the label `replica`."""
    found: dict[str, Metric] = {}
    for name, text in replicas.items():
        for family in text_string_to_metric_families(text.decode()):
            if not _is_in_front(family.name):
                kept = _family(found, family)
                kept.samples += [
                    s._replace(labels={**s.labels, "replica": name}) for s in family.samples
                ]
    for family in text_string_to_metric_families(front.decode()):
        if _is_in_front(family.name):
            _family(found, family).samples += family.samples
    registry = CollectorRegistry()
    registry.register(_Given(list(found.values())))
    return generate_latest(registry)


def _is_in_front(name: str) -> bool:
    return name.removesuffix("_created") in _IN_FRONT


def _family(found: dict[str, Metric], like: Metric) -> Metric:
    return found.setdefault(like.name, Metric(like.name, like.documentation, like.type))


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
