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


@dataclass(frozen=True)
class Outcome:
    """What came of them.

    `failures`: of a row, why its processors gave no scores. `reached`: of a sequence with
    processors, before how many of its drafts they were asked; what is behind was not looked at.
    """

    failures: Mapping[int, str] = field(default_factory=dict)
    reached: Mapping[int, int] = field(default_factory=dict)


def apply_processors(
    scores: torch.Tensor,
    rows: RowMap,
    sequences: Seq[int],
    choose: Callable[[int, torch.Tensor], int],
    block: StepBlock,
) -> Outcome:
    """Run the processors of these `sequences` (numbers in `rows`) on their rows of `scores`.

    Changes `scores` `[rows, vocab]` in place. A processor sees its own row alone; one that fails
    ends its own request alone. It is asked about nothing that plain decoding would not have asked
    it, as it may have a memory: position by position, as long as the drafts hold. `choose(row,
    scores)` is the token of one row with these scores, `[1, vocab]`.
    """
    failures: dict[int, str] = {}
    reached: dict[int, int] = {}
    for i in sequences:
        drafts = rows.drafts[i]
        for row in rows.of(i):
            depth = reached[i] = rows.depths[row]
            try:
                scores[row] = _processed(rows, row, scores[row : row + 1], block)[0]
            except OwnFailure as failure:
                failures[row] = str(failure)
                break
            if depth == len(drafts) or choose(row, scores[row : row + 1]) != drafts[depth]:
                break
    return Outcome(failures, reached)


def _processed(rows: RowMap, row: int, scores: torch.Tensor, block: StepBlock) -> torch.Tensor:
    sequence = rows.sequences[rows.owners[row]]
    ids = block.put([[*sequence.tokens, *rows.before(row)]])
    block.send()
    return processed(sequence.id, sequence.settings.logits_processor, ids, scores)
