"""What was observed to run: counted where it happens, not assumed from what was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jackfield.adapter import AdapterUse
from jackfield.registry import Registered


@dataclass
class Tally:
    """How often each layer called a backend, by phase (one query token a row is decode)."""

    prefill: Counter[int] = field(default_factory=Counter)
    decode: Counter[int] = field(default_factory=Counter)

    def count(self, layer: int, query_length: int) -> None:
        (self.decode if query_length == 1 else self.prefill)[layer] += 1

    @property
    def layers(self) -> set[int]:
        return set(self.prefill) | set(self.decode)


@dataclass(frozen=True)
class Observation:
    """One backend and how often it was called, in all and (attention) by phase and layer.

    `source` is whose kernel it ran on, for a backend that has a choice.
    """

    kind: str
    name: str
    distribution: str
    version: str
    calls: int
    prefill: Mapping[int, int]
    decode: Mapping[int, int]
    source: str | None = None

    def since(self, before: Observation) -> Observation:
        """What was counted after `before`."""
        return replace(
            self,
            calls=self.calls - before.calls,
            prefill=dict(Counter(self.prefill) - Counter(before.prefill)),
            decode=dict(Counter(self.decode) - Counter(before.decode)),
        )

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "calls": self.calls,
        }
        if self.source is not None:
            row["source"] = self.source
        if self.prefill or self.decode:
            row |= {"prefill": dict(self.prefill), "decode": dict(self.decode)}
        return row


@dataclass(frozen=True)
class Report:
    """Which backend, of which distribution and version, was called how often.

    `adapter` is what was found in the modules: None where they have none.
    """

    observations: tuple[Observation, ...]
    adapter: AdapterUse | None = None

    def __getitem__(self, kind: str) -> Observation:
        for observation in self.observations:
            if observation.kind == kind:
                return observation
        raise KeyError(kind)

    def since(self, before: Report | None) -> Report:
        """What was observed after `before` (None: from the start)."""
        if before is None:
            return self
        return replace(self, observations=tuple(o.since(before[o.kind]) for o in self.observations))

    def to_dict(self) -> dict[str, Any]:
        rows = {o.kind: o.to_dict() for o in self.observations}
        return rows | ({"adapter": self.adapter.to_dict()} if self.adapter else {})

    def __str__(self) -> str:
        told = [
            f"{o.kind} {o.name} ({o.distribution} {o.version}"
            f"{', on ' + o.source if o.source else ''}): {o.calls} calls"
            for o in self.observations
        ]
        return "; ".join([*told, *([str(self.adapter)] if self.adapter else [])])


def observe(
    kind: str, registered: Registered, seen: Tally | int, source: str | None = None
) -> Observation:
    """The observation of one backend, from its tally of layer calls or a plain count."""
    # In one go each: another thread may be counting.
    layers = ({}, {}) if isinstance(seen, int) else (dict(seen.prefill), dict(seen.decode))
    whole = seen if isinstance(seen, int) else sum(map(sum, (n.values() for n in layers)))
    return Observation(
        kind, registered.name, registered.distribution, registered.version, whole, *layers, source
    )
