"""The sequences whose pages wait in host memory, of which they may take a part and no more."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.contracts import free_bytes, in_units
from jackfield.errors import first_line

if TYPE_CHECKING:
    from jackfield_plugins.cache.paged.groups import LayerGroup, SwappedPages

logger = logging.getLogger("jackfield")

#: Of the host's memory that would be free without what is swapped, the part that it may take.
HOST_SHARE = 0.5

#: What torch raises where no memory is left: page-locking fails with an error of the driver, which
#: has no class of its own. An error of an earlier kernel is met again in the next step.
_NO_MEMORY = (MemoryError, RuntimeError)


@dataclass(frozen=True)
class _Waiting:
    """A sequence of `tokens` cached tokens, and what each group holds of it."""

    tokens: int
    groups: list[SwappedPages]
    num_bytes: int


class SwappedSequences:
    """Copies sequences to host memory and back, where there is memory for it.

    Where there is not, they are to be computed again from their tokens; `refused` counts them.
    """

    def __init__(self, groups: Collection[LayerGroup]) -> None:
        self._groups = groups
        self._waiting: dict[int, _Waiting] = {}
        self._told = False
        self.refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._waiting

    def pages(self, sequence: int) -> list[int]:
        """How many pages a sequence needs to come back, in each group."""
        return [saved.count for saved in self._waiting[sequence].groups]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._waiting.values())

    def out(self, sequence: int, tokens: int) -> None:
        """Copy the pages of a sequence with `tokens` cached tokens, or refuse to."""
        size = sum(group.saved_bytes(sequence) for group in self._groups)
        if (why := self._too_much(size)) is None:
            try:
                saved = [group.save(sequence) for group in self._groups]
            except _NO_MEMORY as error:
                why = first_line(error)
            else:
                self._waiting[sequence] = _Waiting(tokens, saved, size)
                return
        self._refuse(f"copying {in_units(size)} to host memory: {why}")

    def _too_much(self, size: int) -> str | None:
        """Why so many bytes more are too many; None: they are not, or nobody can tell."""
        free, used = free_bytes("cpu"), self.num_bytes
        if free is None or used + size <= HOST_SHARE * (free + used):
            return None
        return (
            f"{in_units(free)} are free, and swapped requests, which have {in_units(used)}, may "
            f"take {HOST_SHARE:g} of both"
        )

    def back(self, sequence: int) -> int | None:
        """Give it pages with what they held; returns how many tokens are cached.

        None where that failed. It is forgotten then, and holds no pages.
        """
        one = self._waiting.pop(sequence)
        try:
            for group, saved in zip(self._groups, one.groups, strict=True):
                group.restore(sequence, saved)
        except _NO_MEMORY as error:
            for group in self._groups:
                group.drop(sequence)
            self._refuse(f"copying {in_units(one.num_bytes)} from host memory: {first_line(error)}")
            return None
        return one.tokens

    def _refuse(self, why: str) -> None:
        self.refused += 1
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        logger.log(level, "a preempted request is computed again instead of %s", why)

    def forget(self, sequence: int) -> None:
        self._waiting.pop(sequence, None)

    def close(self) -> None:
        self._waiting.clear()
