"""Rows of a small encoder-decoder model that join others, tried on the CPU, and rows that leave.

As `encoder_trial`, for what continuous batching adds: texts that begin with different numbers of
tokens, rows padded at the left that join a batch, and columns that go with the row that used them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from jackfield.bridge.batch_trial import apart
from jackfield.bridge.encoders import beside_an_encoder, cached_config
from jackfield.bridge.joined_rows import crop_encoder, join, take
from jackfield.contracts import ModelInputs
from jackfield.errors import first_line

NEW = 6  # tokens of each text
_DIFFERS = "a row that joins others says something else"


@dataclass(frozen=True, eq=False)
class Texts:
    """What is tried: prompts that were read, and texts behind them.

    Attributes:
        config: Of the model.
        forward: Its call in a step.
        joined: As `TextEncoder.joined`.
        states: What the encoder said of each of three prompts, `[columns, size]`.
        new: Tokens of their texts, `[3, NEW]`.
        alone: Logits of each token where nobody else runs, `[3, NEW, vocab]`.
        begin: How many tokens a text may begin with: 1, or 2 for any number.
    """

    config: PreTrainedConfig
    forward: Callable[[ModelInputs], torch.Tensor]
    joined: Callable[[Seq[torch.Tensor], int], dict[str, Any]]
    states: Seq[torch.Tensor]
    new: torch.Tensor
    alone: torch.Tensor
    begin: int


def joining_fault(texts: Texts) -> str | None:
    """What rows say otherwise where some join others; None: nothing."""
    try:
        wrong = _short_ones_join(texts) or (texts.begin > 1 and _a_long_one_joins(texts))
        return _DIFFERS if wrong else None
    except Exception as error:  # noqa: BLE001 - any model's code
        return f"a small model of its kind fails where rows join others: {first_line(error)}"


def _short_ones_join(texts: Texts) -> bool:
    """Whether something differs where two begin beside one that is further, which then leaves."""
    running, coming = _Batch(texts, [0]), _Batch(texts, [1, 2])
    wrong = [running.step(n) for n in (texts.begin, 1, 1)]
    wrong.append(coming.step(1, texts.begin))
    running.join(coming)
    wrong.append(running.step(1, 1, 1))
    running.stay([2, 1])
    wrong += [running.step(1, 1), running.step(1, 1)]
    return any(wrong)


def _a_long_one_joins(texts: Texts) -> bool:
    """Whether something differs where one begins with more tokens than there are columns."""
    running, coming = _Batch(texts, [1]), _Batch(texts, [0])
    wrong = [running.step(1), coming.step(4)]
    running.join(coming)
    return any([*wrong, running.step(1, 1), running.step(1, 1)])


class _Batch:
    """Some of the texts, as `JoiningKVCache` lays them out."""

    def __init__(self, texts: Texts, rows: list[int]) -> None:
        self._texts, self._rows = texts, rows
        self._past = beside_an_encoder(DynamicCache(config=cached_config(texts.config)))
        self._read = [0 for _ in rows]  # tokens of each

    def step(self, *counts: int) -> bool:
        """Whether any says something else of the last of its next `counts` tokens."""
        width, columns = max(counts), max(self._read) + max(counts)
        begun, ids, positions, valid = list(self._read), [], [], []
        for at, count in enumerate(counts):
            own = self._texts.new[self._rows[at], begun[at] : begun[at] + count].tolist()
            gap = width - count
            # What padding is must not matter, so here it is a token of another place.
            ids.append([*own[:1] * gap, *own])
            positions.append([*[0] * gap, *range(begun[at], begun[at] + count)])
            self._read[at] += count
            valid.append([0] * (columns - self._read[at]) + [1] * self._read[at])
        states = [self._texts.states[row] for row in self._rows]
        mask = torch.tensor(valid)
        kwargs: dict[str, Any] = {
            "input_ids": torch.tensor(ids),
            "position_ids": torch.tensor(positions),
            "attention_mask": None if bool(mask.all()) else mask,
            "past_key_values": self._past,
            "use_cache": True,
            "logits_to_keep": 1,
            **self._texts.joined(states, max(map(len, states))),
        }
        found = self._texts.forward(ModelInputs(kwargs, len(ids)))[:, -1]
        right = torch.stack(
            [self._texts.alone[r, n - 1] for r, n in zip(self._rows, self._read, strict=True)]
        )
        return apart(found, right)

    def join(self, coming: _Batch) -> None:
        join(self._past, coming._past)
        self._rows = [*self._rows, *coming._rows]
        self._read += coming._read

    def stay(self, rows: list[int]) -> None:
        """The others leave, and with them the columns that they alone used."""
        self._rows, self._read = [self._rows[r] for r in rows], [self._read[r] for r in rows]
        take(self._past, torch.tensor(rows), max(self._read))
        crop_encoder(self._past, max(len(self._texts.states[row]) for row in self._rows))
