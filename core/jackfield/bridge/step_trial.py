"""Texts that nobody asked for, decoded for a few steps, to compare recorded steps with eager ones.

What was recorded is right if it goes by what lies on the device when it is played. Whether it does
shows where lengths, rows and pages are others than those with which it was recorded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.contracts import KVCache, ModelInputs

    Forward = Callable[[ModelInputs], torch.Tensor]

#: How many tokens a text is continued by. The last one by fewer sequences than those before.
STEPS = 3

#: No difference between two ways of computing the same is worse; recorded steps are held to it too.
MOST_NOISE = 0.5


class StepTrial:
    """Decode steps of `rows` sequences, or of the `most` that there can be, in a cache without any.

    `eager` computes a step as the model's code has it. Nothing is left in the cache.
    """

    def __init__(
        self,
        cache: KVCache,
        eager: Forward,
        vocab_size: int,
        longest: int | None,
    ) -> None:
        self._cache = cache
        self._eager = eager
        self._vocab_size = vocab_size
        self._longest = longest

    def eagerly(self, rows: int, most: int) -> tuple[list[list[int]], list[torch.Tensor], float]:
        """Texts, what each step says of them, and how far it is from what one long step says.

        Raises ExecutionError where the cache has no room for so many.
        """
        for texts in self._texts(rows, most):
            try:
                said = self.decode(texts, rows, self._eager)
                break
            except _NoRoomError:
                continue
        else:
            raise ExecutionError(f"the cache has no room to try steps of {rows} sequences")
        return texts, said, distance(self._whole(texts), said[0])

    def decode(self, texts: list[list[int]], rows: int, forward: Forward) -> list[torch.Tensor]:
        """Logits `[sequences, vocab]` of each step of single tokens, computed by `forward`."""
        said = []
        with _Held(self._cache) as held:
            sequences = held.admit([text[:-STEPS] for text in texts])
            held.feed(sequences, [len(s.tokens) - 1 - s.num_cached for s in sequences], self._eager)
            for at in range(STEPS):
                if at == STEPS - 1:
                    few = slice(-(rows // 2 + 1), None)
                    sequences, texts = sequences[few], texts[few]
                said.append(held.feed(sequences, [1] * len(sequences), forward))
                for sequence, text in zip(sequences, texts, strict=True):
                    list.append(sequence.tokens, text[len(sequence.tokens)])
        return said

    def _whole(self, texts: list[list[int]]) -> torch.Tensor:
        """What the first of these steps says, where prompts are read to their ends in one step."""
        with _Held(self._cache) as held:
            sequences = held.admit([text[:-STEPS] for text in texts])
            return held.feed(sequences, [len(s.tokens) for s in sequences], self._eager)

    def _texts(self, rows: int, most: int) -> Iterator[list[list[int]]]:
        """One of them longer than a page; then as few and as short ones as show a step."""
        page = getattr(self._cache, "page_size", None) or 0
        longest = page + 2 if self._longest is None else min(page + 2, self._longest - STEPS)
        draw = random.Random(rows)
        for first, count in ((max(3, longest), min(rows, most)), (3, rows // 2 + 1)):
            lengths = [first, *(3 + 3 * row % 7 for row in range(1, count))]
            yield [
                [draw.randrange(self._vocab_size) for _ in range(length + STEPS)]
                for length in lengths
            ]


class _NoRoomError(ExecutionError):
    """The cache cannot take all sequences, or a step of them."""


class _Held:
    """The sequences of a trial, which leave the cache when it ends, whatever happened."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._sequences: list[Sequence] = []

    def __enter__(self) -> _Held:
        self._cache.forget()  # so that nobody finds what an earlier trial has stored
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.release(self._sequences)

    def admit(self, prompts: Seq[Seq[int]]) -> list[Sequence]:
        for number, prompt in enumerate(prompts, 1):
            settings = Settings(max_new_tokens=STEPS, cache_salt=f"trial {number}")
            sequence = Sequence(-number, prompt, settings)
            sequence.preemptions = 1  # so that no statistic counts its prompt
            self._sequences.append(sequence)
            if not self._cache.admit(sequence):
                raise _NoRoomError("the cache has no room for a trial")
        return list(self._sequences)

    def feed(self, sequences: Seq[Sequence], counts: Seq[int], forward: Forward) -> torch.Tensor:
        """Logits `[sequences, vocab]` of the last token that is fed of each."""
        parts = zip(sequences, counts, strict=True)
        step = Step([ScheduledSequence(one, one.num_cached, count) for one, count in parts])
        if not self._cache.fits(step):
            raise _NoRoomError("the cache has no room for a trial")
        logits = forward(self._cache.prepare(step))[:, -1].clone()
        self._cache.commit(step, list(counts))
        return logits


def bound_of(dtype: torch.dtype, noise: float, *, traced: bool) -> float:
    """How far apart two ways of computing the same logits may be, which once were by `noise`.

    What is `traced` rounds elsewhere than the model's code: honest steps of 8 billion parameters in
    bfloat16 were 0.089 apart.
    """
    # Layers of transformers compute in float32, also in float64.
    eps = max(torch.finfo(one).eps for one in (dtype, torch.float32))
    return min(MOST_NOISE, max((2 if traced else 1) * math.sqrt(eps), 4 * noise))


def distance(found: torch.Tensor, due: torch.Tensor) -> float:
    """How far the row that is farthest is from the one due, in parts of the spread of that one."""
    finite = due.isfinite()
    found, due = (torch.where(finite, x, 0).double() for x in (found, due))
    spread = (due - due.mean(1, keepdim=True)).norm(dim=1)
    return float(((found - due).norm(dim=1) / spread.clamp_min(1e-30)).max())
