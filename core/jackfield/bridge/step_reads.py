"""What a step that decodes reads of the weights: most of them, but not all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A parameter of `num_bytes` bytes that is only looked up: `token_bytes` of it for a token."""

    num_bytes: int
    token_bytes: int


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer, `num_bytes` bytes together: `active` of `count` for a token."""

    num_bytes: int
    count: int
    active: int

    def read(self, batch: int) -> float:
        """Bytes read for `batch` tokens, each of which picks its experts at random."""
        return self.num_bytes * (1 - (1 - self.active / self.count) ** batch)


@dataclass(frozen=True)
class StepReads:
    """Which weights a step does not read as a whole. `idle` bytes are not touched at all."""

    tables: tuple[Table, ...] = ()
    experts: tuple[ExpertWeights, ...] = ()
    idle: int = 0

    def unread(self, batch: int) -> int:
        """How many bytes of the weights a step does not read that decodes `batch` sequences."""
        tables = sum(max(0, t.num_bytes - batch * t.token_bytes) for t in self.tables)
        experts = sum(e.num_bytes - e.read(batch) for e in self.experts)
        return self.idle + tables + round(experts)
