"""Which tokens sequences have, each once, as lists that are kept while they grow: for a CPU.

A penalty touches the scores of these tokens alone, hundreds or thousands of a vocabulary of 100,000
and more. `TokenTable` has the same as rows of the whole vocabulary: for a GPU, and where that is
small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from jackfield.contracts import Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BESIDE = 8  # histories of sequences that rest for a step are kept: so many, and one for each row


class History:
    """The tokens of one sequence: all of them, or with `generated` the new ones only."""

    def __init__(self, sequence: Sequence, *, generated: bool) -> None:
        self.sequence = sequence
        self._tokens = sequence.tokens  # a beam that becomes another gets another list
        self._read = sequence.prompt_length if generated else 0
        self._place: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._counts: NDArray[np.float32] = np.empty(0, np.float32)

    def holds(self) -> bool:
        """Whether the sequence has only grown since it was read: that is all that lists do."""
        return self.sequence.tokens is self._tokens

    def grow(self) -> None:
        """Read what is new."""
        new = self._tokens[self._read :]
        if not new:
            return
        self._read = len(self._tokens)
        counted = Counter(new)
        if not self._place:
            self._place = {token: place for place, token in enumerate(counted)}
            self._ids = np.fromiter(counted, np.int64)
            self._counts = np.fromiter(counted.values(), np.float32)
            return
        for token, times in counted.items():
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += times

    def of(self, drafts: Seq[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Its token ids, each once, and how often each is there, with the `drafts` behind it.

        int64 and float32 `[n]`. The next `grow` may change them.
        """
        count = len(self._place)
        ids, counts = self._ids[:count], self._counts[:count]
        if drafts:
            own = Counter(drafts)
            fresh = [token for token in own if token not in self._place]
            ids = np.concatenate([ids, np.array(fresh, np.int64)])
            counts = np.concatenate([counts, np.array([own.pop(t) for t in fresh], np.float32)])
            for token, times in own.items():
                counts[self._place[token]] += times
        return torch.from_numpy(ids), torch.from_numpy(counts)


class Histories:
    """The histories of the sequences that ask; each of their tokens is read once."""

    def __init__(self, *, generated: bool) -> None:
        self._generated = generated
        self._known: dict[int, History] = {}  # by the identity of the sequence, which it holds

    def of(self, sequences: Seq[Sequence]) -> list[History]:
        """One for each, up to date."""
        found = [self._one(sequence) for sequence in sequences]
        if len(self._known) > 2 * len(found) + _BESIDE:
            self._known = {id(history.sequence): history for history in found}
        return found

    def _one(self, sequence: Sequence) -> History:
        known = self._known.get(id(sequence))
        if known is None or not known.holds():
            known = self._known[id(sequence)] = History(sequence, generated=self._generated)
        known.grow()
        return known
