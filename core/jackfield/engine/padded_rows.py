"""How a row lies in columns: what all caches of the padded layout have in common."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
import transformers

from jackfield.bridge.encoders import beside_an_encoder, layers_of
from jackfield.contracts import ScheduledSequence, Sequence
from jackfield.errors import PluginError, quoted


def columns_of(sequences: Seq[Sequence]) -> int:
    """How many columns a batch of these has at most: the last new token is never fed."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    return longest + max(still_new(sequence) for sequence in sequences) - 1


def still_new(sequence: Sequence) -> int:
    """How many new tokens it can still get."""
    return sequence.settings.max_new_tokens - sequence.num_new


def take_off(runs: list[list[int]], count: int) -> None:
    """Drop the last `count` places of a row."""
    while count:
        taken = min(count, runs[-1][1])
        runs[-1][1] -= taken
        count -= taken
        if not runs[-1][1]:
            runs.pop()


def aligned(item: ScheduledSequence, width: int) -> tuple[list[int], list[int], list[int]]:
    """Token ids, positions and validity of a row of `width` columns, the tokens at its right."""
    tokens = item.token_ids
    gap = [0] * (width - len(tokens))
    positions = range(item.start, item.start + len(tokens))
    return [*gap, *tokens], [*gap, *positions], [*gap, *([1] * len(tokens))]


def idle(width: int) -> tuple[list[int], list[int], list[int]]:
    """A row that nobody reads sees itself, since a row that sees nothing can become NaN."""
    return [0] * width, [0] * width, [1] * width


def made(make: Callable[[int | None], Any], columns: int, *, encodes: bool) -> transformers.Cache:
    """A cache for rows of so many columns at most; `encodes`: beside what an encoder said."""
    past = make(columns)
    if not isinstance(past, transformers.Cache):
        raise PluginError(f"make must return a transformers Cache, got {quoted(past)}")
    return beside_an_encoder(past) if encodes else past


def held_bytes_of(past: transformers.Cache | None) -> int | None:
    """What the tensors of `past` take; None where layers keep something else, as linear ones do."""
    layers = layers_of(past)
    states = [getattr(x, name, None) for x in layers for name in ("keys", "values")]
    tensors = [state for state in states if isinstance(state, torch.Tensor)]
    if len(tensors) < len(states):
        return None
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
