"""Decoding `ngram-index`: drafts what followed the last tokens when they stood there before.

Prompt lookup (Saxena 2023): where a text copies from itself, its own past is a good guess.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jackfield import hookimpl
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Decoding,
    DecodingCapabilities,
    Sequence,
    Strategy,
)


@dataclass(frozen=True)
class Options:
    """The keys of `plugin:ngram-index?key=value`; their types are checked.

    `ngram`: how many last tokens are looked for. `drafts`: how many are proposed at most.
    """

    ngram: int = 2
    drafts: int = 8

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")


class OwnPast(Strategy):
    """A guess costs time and never changes a text: the loop keeps what the sampler agrees with."""

    min_acceptance_rate = 0.1  # where fewer drafts are kept, a request goes without for a while

    def __init__(self, options: Options) -> None:
        self._options = options
        self._indexes: dict[int, Index] = {}  # by the id of a sequence

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        """A list for each sequence, at most `max_drafts[i]` token ids; empty: no guess."""
        found = []
        for sequence, room in zip(sequences, max_drafts, strict=True):
            index = self._indexes.setdefault(sequence.id, Index(self._options.ngram))
            at = index.after(sequence.tokens)
            count = min(room, self._options.drafts)
            found.append([] if at is None else sequence.tokens[at : at + count])
        return found

    def release(self, sequences: Seq[Sequence]) -> None:
        """Called with all that end, also with those that never came by here."""
        for sequence in sequences:
            self._indexes.pop(sequence.id, None)


class Index:
    """Where each n-gram of a growing text ended last, so that a guess costs one look."""

    def __init__(self, size: int) -> None:
        self._size, self._seen = size, 0
        self._ends: dict[tuple[int, ...], int] = {}

    def after(self, tokens: list[int]) -> int | None:
        """The place behind the latest earlier occurrence of the last n-gram; None: there is none.

        The one at the very end goes in when something follows it.
        """
        for end in range(max(self._size, self._seen), len(tokens)):
            self._ends[tuple(tokens[end - self._size : end])] = end
        self._seen = len(tokens)
        return self._ends.get(tuple(tokens[-self._size :]))


class NgramIndexBackend(Decoding):
    """What is declared here is what `jackfield check` proves; anything else is refused."""

    name = "ngram-index"
    options = Options
    # rollback: drafts may be taken back, so the cache must be able to. The settings are those of
    # the sampler, which decides; a request with any other is refused.
    capabilities = DecodingCapabilities(settings=SAMPLER_SETTINGS, rollback=True)

    def max_drafts(self, options: Any) -> int:
        """For the memory of a step, which is planned before anything runs."""
        return int(options.drafts)

    def bind(self, context: BindContext) -> Strategy:
        return OwnPast(context.options)


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [NgramIndexBackend()]
