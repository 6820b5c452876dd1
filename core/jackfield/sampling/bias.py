"""Bias: what is added to the scores of single tokens, some only behind other tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch

from jackfield.contracts import StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import places, widest

Entry = tuple[int, int, float]  # row, token, what is added


@dataclass(frozen=True, eq=False)
class Bias:
    """Numbers that are added to scores, round by round.

    A round has the rows, the tokens (int64 `[n]` each) and the numbers (`[n]`). No place is twice
    in a round, so that sums are made in one order on every device.
    """

    rounds: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    in_place: ClassVar[bool] = True

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Changes `scores` `[rows, vocab]` in place, and returns it."""
        for rows, tokens, values in self.rounds:
            scores.index_put_((rows, tokens), values.to(scores.dtype), accumulate=True)
        return scores


def _bias(entries: Seq[Entry], dtype: torch.dtype, block: StepBlock) -> Bias | None:
    """What adds these one after another; None: there are none."""
    if not entries:
        return None
    rounds: list[list[Entry]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        number = seen[entry[:2]]
        seen[entry[:2]] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(entry)
    return Bias(
        tuple(
            (*places([e[:2] for e in own], block), block.put([e[2] for e in own], dtype))
            for own in rounds
        )
    )


def single_tokens(rows: RowMap, asked: Seq[int], block: StepBlock) -> Bias | None:
    """The biases of the rows `asked` that hold whatever the tokens before are."""
    entries = [
        (row, ids[0], value)
        for row in asked
        for ids, value in rows.sequences[rows.owners[row]].settings.sequence_bias.items()
        if len(ids) == 1
    ]
    return _bias(entries, torch.float32, block)


def phrases(rows: RowMap, asked: Seq[int], block: StepBlock) -> Bias | None:
    """The biases of tokens that would complete a phrase of theirs, for the rows `asked`."""
    entries: list[Entry] = []
    for row in asked:
        last = rows.tail(row, 1)[0]
        known = rows.sequences[rows.owners[row]].settings.sequence_bias
        entries += [
            (row, ids[-1], value)
            for ids, value in known.items()
            if len(ids) > 1 and ids[-2] == last and rows.tail(row, len(ids) - 1) == [*ids[:-1]]
        ]
    return _bias(entries, widest(block.device), block)
