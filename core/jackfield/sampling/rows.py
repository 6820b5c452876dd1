"""Which row of a step's logits belongs to which sequence, and to which place in its drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from jackfield.contracts import Sequence, Settings


@dataclass(frozen=True)
class RowMap:
    """The rows of one step; valid until a sequence grows, but for a pipeline that `lasts`.

    Row r belongs to `sequences[owners[r]]`. It asks what follows the tokens of the sequence and the
    first `depths[r]` of its `drafts`. The rows of a sequence lie together. `lengths`: how many
    tokens each sequence had when the map was made.
    """

    sequences: tuple[Sequence, ...]
    drafts: tuple[Seq[int], ...]
    owners: tuple[int, ...]
    depths: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def verifying(cls, sequences: Seq[Sequence], drafts: Seq[Seq[int]] | None = None) -> RowMap:
        """A row after each number of drafts, from none to all. Without `drafts`: one row each."""
        if drafts and any(drafts):
            return cls._of(sequences, tuple(drafts), [range(1 + len(own)) for own in drafts])
        count = len(sequences)
        lengths = tuple([len(s.tokens) for s in sequences])
        return cls(tuple(sequences), ((),) * count, tuple(range(count)), (0,) * count, lengths)

    @classmethod
    def drafting(cls, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> RowMap:
        """One row for each sequence, after all of its drafts."""
        return cls._of(sequences, tuple(drafts), [(len(own),) for own in drafts])

    @classmethod
    def _of(
        cls, sequences: Seq[Sequence], drafts: tuple[Seq[int], ...], depths: Seq[Seq[int]]
    ) -> RowMap:
        return cls(
            tuple(sequences),
            drafts,
            tuple(i for i, own in enumerate(depths) for _ in own),
            tuple(depth for own in depths for depth in own),
            tuple(len(s.tokens) for s in sequences),
        )

    def pick(self, rows: Seq[int]) -> RowMap:
        """The same sequences with some of their rows only, in this order."""
        owners, depths = tuple(self.owners[r] for r in rows), tuple(self.depths[r] for r in rows)
        return RowMap(self.sequences, self.drafts, owners, depths, self.lengths)

    def __len__(self) -> int:
        return len(self.owners)

    @cached_property
    def _first(self) -> list[int]:
        counts = [0] * len(self.sequences)
        for i in self.owners:
            counts[i] += 1
        return [0, *accumulate(counts)]

    def of(self, i: int) -> range:
        """The rows of sequence i."""
        return range(self._first[i], self._first[i + 1])

    def __iter__(self) -> Iterator[tuple[int, Sequence, int]]:
        """Each row, its sequence, and how many drafts are before it."""
        for row, (i, depth) in enumerate(zip(self.owners, self.depths, strict=True)):
            yield row, self.sequences[i], depth

    def before(self, row: int) -> Seq[int]:
        """The drafts before a row."""
        return self.drafts[self.owners[row]][: self.depths[row]]

    def tail(self, row: int, count: int) -> list[int]:
        """The last `count` (>= 1) tokens before what a row asks for; fewer where there are not."""
        tokens = self.sequences[self.owners[row]].tokens
        return [*tokens[-count:], *self.before(row)][-count:]

    def asking(self, asks: Callable[[Settings], object]) -> list[int]:
        """The rows of sequences whose settings ask for something."""
        wanted = [asks(s.settings) for s in self.sequences]
        return [row for row, i in enumerate(self.owners) if wanted[i]] if any(wanted) else []

    def fits(
        self, sequences: Seq[Sequence], drafts: Seq[Seq[int]] | None, *, grown: bool = False
    ) -> bool:
        """Whether it is what `verifying` would make of these now; but for tokens where `grown`."""
        return (
            (grown or self.lengths == tuple([len(s.tokens) for s in sequences]))
            and _same(self.sequences, sequences)
            and all(map(_equal, self.drafts, drafts or [()] * len(sequences)))
        )

    def like(self, other: RowMap) -> bool:
        """Whether each row belongs to the same sequence in both."""
        return self.owners == other.owners and _same(self.sequences, other.sequences)


def _equal(one: Seq[int], other: Seq[int]) -> bool:
    return len(one) == len(other) and list(one) == list(other)


def _same(one: Seq[Sequence], other: Seq[Sequence]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
