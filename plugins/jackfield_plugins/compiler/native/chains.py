"""Operations on rows, one after another, as one call of the kernel: see `fusing.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jackfield_plugins.compiler.native.graph import Meta

FUSED = "fused"  # the target of a node that is a chain


class Given(NamedTuple):
    """An input of a chain, by its number."""

    at: int


class Made(NamedTuple):
    """What the step of a chain with this number makes."""

    at: int


class Step(NamedTuple):
    """An operation of `OPERATIONS`, or "cat" along rows; inputs are `Given`, `Made` or numbers.

    `factor` is that of the second input of "add" and "sub".
    """

    operation: str
    inputs: tuple[Any, ...]
    factor: float
    out: Meta

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.out.shape[-1] if self.out.shape else 1

    @property
    def needs_rows(self) -> bool:
        """Whether a number that it makes depends on several of an input."""
        return self.operation == "cat" or self.operation.startswith("fold")

    @property
    def outer(self) -> tuple[int, ...]:
        """How many rows, without leading ones."""
        outer = self.out.shape[:-1]
        return outer[next((d for d, n in enumerate(outer) if n != 1), len(outer)) :]


def by_row(steps: Sequence[Step]) -> bool:
    """Whether whole rows have to lie in the buffer of a chain of these."""
    alike = len({step.out.shape for step in steps}) == 1
    return not alike or any(step.needs_rows for step in steps)


@dataclass(eq=False)
class Chain:
    """`steps` in their order; those of `kept` are the ones whose numbers are written to memory.

    `computed` is what numbers are computed in, one of `pointwise.IN_FLOAT` and its neighbours.
    """

    steps: tuple[Step, ...]
    kept: tuple[int, ...]
    computed: int

    @property
    def outer(self) -> tuple[int, ...]:
        """The dimensions before the last one of all that is made, broadcast."""
        rank = max(len(step.out.shape) for step in self.steps)
        most = max((step.outer for step in self.steps), key=len)
        return (1,) * (rank - 1 - len(most)) + most

    @cached_property
    def by_row(self) -> bool:
        return by_row(self.steps)
