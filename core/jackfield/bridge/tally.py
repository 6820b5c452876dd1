"""How often layers called a backend: counted where the calls happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Tally:
    """How often each layer called a backend, by phase (one query token a row is decode)."""

    prefill: Counter[int] = field(default_factory=Counter)
    decode: Counter[int] = field(default_factory=Counter)

    def count(self, layer: int, query_length: int) -> None:
        (self.decode if query_length == 1 else self.prefill)[layer] += 1

    def count_all(self, layers: Iterable[int], query_length: int) -> None:
        """One call of each of `layers`."""
        (self.decode if query_length == 1 else self.prefill).update(layers)

    @property
    def layers(self) -> set[int]:
        return set(self.prefill) | set(self.decode)
