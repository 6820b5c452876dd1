"""The draft model that a decoding strategy may ask for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from jackfield.contracts.sequences import Sequence


class Assistant(Protocol):
    """A draft model, bound to a plan of its own."""

    #: how many tokens it can read at most; None: any number
    context_length: int | None

    def draft(self, sequences: Seq[Sequence], most: Seq[int], sure: Seq[float]) -> list[list[int]]:
        """Go on with copies of `sequences`: drafts for each, at most `most[i]`.

        A draft that its own model gives less than the probability `sure[i]` is the last. Drawn by
        the random numbers that the sampler will use at the same positions.
        """
        ...

    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget these sequences; unknown ones are ignored."""
        ...
