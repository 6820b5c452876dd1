"""The processors that a request brought along, run on its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jackfield.contracts import StepBlock
from jackfield.sampling.fenced import OwnFailure, processed
from jackfield.sampling.rows import RowMap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Marked:
    """A row with a watermark: its token, the `scores` `[vocab]` that it is chosen by.

    `best` is the best score before, not finite where no token can be chosen.
    """

    token: int
    best: float
    scores: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """What came of them.

    `failures`: of a row, why its processors gave no scores. `reached`: of a sequence with
    processors, before how many of its drafts they were asked; what is behind was not looked at.
    `marked` are rows with a watermark, whose tokens are chosen.
    """

    failures: Mapping[int, str] = field(default_factory=dict)
    reached: Mapping[int, int] = field(default_factory=dict)
    marked: Mapping[int, Marked] = field(default_factory=dict)

    def put(self, tokens: torch.Tensor, best: torch.Tensor) -> None:
        """Put what is chosen of the `marked` rows among `tokens` and `best` scores, `[rows]`."""
        for row, one in self.marked.items():
            tokens[row], best[row] = one.token, one.best

    def shown(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[rows, vocab]`, changed to what the tokens of `marked` rows are chosen by."""
        for row, one in self.marked.items():
            scores[row] = one.scores
        return scores


def apply_processors(
    scores: torch.Tensor,
    rows: RowMap,
    sequences: Seq[int],
    choose: Callable[[int, torch.Tensor], int],
    mark: Callable[[int, torch.Tensor], Marked],
    block: StepBlock,
) -> Outcome:
    """Run the processors of these `sequences` (numbers in `rows`) on their rows of `scores`.

    Changes `scores` `[rows, vocab]` in place. A processor sees its own row alone; one that fails
    ends its own request alone. It is asked about nothing that plain decoding would not have asked
    it, as it may have a memory: position by position, as long as the drafts hold. `choose(row,
    scores)` is the token of one row with these scores, `[1, vocab]`, which stay as they are, and
    `mark` is what its watermark makes of it.
    """
    failures: dict[int, str] = {}
    reached: dict[int, int] = {}
    marked: dict[int, Marked] = {}
    for i in sequences:
        drafts, marks = rows.drafts[i], rows.sequences[i].settings.watermark is not None
        for row in rows.of(i):
            depth = reached[i] = rows.depths[row]
            try:
                scores[row] = _processed(rows, row, scores[row : row + 1], block)[0]
                if marks:
                    marked[row] = mark(row, scores[row : row + 1])
            except OwnFailure as failure:
                failures[row] = str(failure)
                break
            if depth == len(drafts):
                break
            token = marked[row].token if marks else choose(row, scores[row : row + 1])
            if token != drafts[depth]:
                break
    return Outcome(failures, reached, marked)


def _processed(rows: RowMap, row: int, scores: torch.Tensor, block: StepBlock) -> torch.Tensor:
    sequence = rows.sequences[rows.owners[row]]
    own = sequence.settings.logits_processor
    return processed(sequence.id, own, _ids(rows, row, block), scores) if own else scores


def watermarked(rows: RowMap, row: int, scores: torch.Tensor, block: StepBlock) -> torch.Tensor:
    """What a row's token is chosen by, `[1, vocab]`, with the watermark. Raises OwnFailure."""
    sequence = rows.sequences[rows.owners[row]]
    own = sequence.settings.watermark
    assert own is not None
    return processed(sequence.id, (own,), _ids(rows, row, block), scores, "watermarking_config")


def _ids(rows: RowMap, row: int, block: StepBlock) -> torch.Tensor:
    """The tokens before what a row asks for, int64 `[1, length]`."""
    sequence = rows.sequences[rows.owners[row]]
    ids = block.put([[*sequence.tokens, *rows.before(row)]])
    block.send()
    return ids
