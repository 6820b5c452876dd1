"""The draft model that a decoding strategy may ask for, or the heads of the model itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from jackfield.contracts.sequences import Sequence


class Assistant(Protocol):
    """A draft model, bound to a plan of its own; or the model's own heads, of which each drafts one
    token, and none where the model's hidden states before the last token are not known.
    """

    #: how many tokens it can read at most; None: any number
    context_length: int | None

    def draft(
        self, sequences: Seq[Sequence], max_drafts: Seq[int], confidence_threshold: Seq[float]
    ) -> list[list[int]]:
        """Go on with copies of sequences, in batches; drawn by the random numbers of the sampler.

        Called in the loop's thread, from `Strategy.propose` alone.

        Args:
            sequences: As `propose` was handed them.
            max_drafts: One number each: how many drafts at most.
            confidence_threshold: One probability each: a draft that the draft model gives less
                is the last.

        Returns:
            One list of token ids of the main model each, fewer or none where the draft model's
            context ends or its cache is full.

        Raises:
            ExecutionError: The draft model's own code failed.
        """
        ...

    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget these `sequences`; unknown ones are ignored. Call it from `Strategy.release`."""
        ...
