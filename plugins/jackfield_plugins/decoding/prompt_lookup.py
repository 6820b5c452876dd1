"""``prompt_lookup``: what followed the last words when they stood there before.

Where a text copies from itself (an edit, a summary, code), an n-gram at its end has been seen
earlier, and what came after it then is a good guess at what comes now. After Saxena 2023 (prompt
lookup decoding) and transformers' `prompt_lookup_num_tokens`; here an index of the n-grams is kept
as the text grows, so that a guess costs a look into a dict and not a walk through the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Decoding,
    DecodingCapabilities,
    Strategy,
)
from jackfield_plugins.decoding.paying import DraftOptions

if TYPE_CHECKING:
    from jackfield.contracts import Sequence


@dataclass(frozen=True)
class LookupOptions(DraftOptions):
    """Drafts at most, and the longest n-gram that is looked for (down to 2 tokens).

    Requests override both by the settings of these names.
    """

    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 3
    min_acceptance_rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        super().__post_init__()


class PromptLookup(Decoding):
    """Needs no second model. Requests override it with transformers' own two settings."""

    name = "prompt_lookup"
    options = LookupOptions
    capabilities = DecodingCapabilities(
        settings=SAMPLER_SETTINGS | {"prompt_lookup_num_tokens", "max_matching_ngram_size"},
        rollback=True,
    )

    def max_drafts(self, options: Any) -> int:
        return int(options.prompt_lookup_num_tokens)

    def bind(self, context: BindContext) -> Strategy:
        return PromptLookupStrategy(context.options)


@dataclass(slots=True)
class Index:
    """Where each n-gram of a growing text ended last, and before that.

    `ends[n][gram]` is the position after its last occurrence that something follows.
    """

    sizes: range
    indexed: int = 0
    ends: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def grow(self, tokens: list[int]) -> None:
        """Take in what is new; the n-grams at the very end have no continuation yet."""
        for n in self.sizes:
            places = self.ends.setdefault(n, {})
            for end in range(max(n, self.indexed), len(tokens)):
                places[tuple(tokens[end - n : end])] = end
        self.indexed = len(tokens)

    def after(self, tokens: list[int]) -> int | None:
        """The position after the last earlier occurrence of the longest n-gram at the end."""
        for n in reversed(self.sizes):
            if len(tokens) > n and (at := self.ends[n].get(tuple(tokens[-n:]))) is not None:
                return at
        return None


class PromptLookupStrategy(Strategy):
    """Keeps an index of each sequence, prompt and new tokens alike."""

    def __init__(self, options: LookupOptions) -> None:
        self._options = options
        self.min_acceptance_rate = options.min_acceptance_rate
        self.min_speedup = options.min_speedup
        self._indexes: dict[int, Index] = {}

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        return [self._drafts(s, room) for s, room in zip(sequences, max_drafts, strict=True)]

    def _drafts(self, sequence: Sequence, room: int) -> list[int]:
        asked, tokens = sequence.settings.drafts, sequence.tokens
        index = self._indexes.get(sequence.id)
        if index is None:
            longest = asked.max_matching_ngram_size or self._options.max_matching_ngram_size
            index = self._indexes[sequence.id] = Index(range(min(2, longest), longest + 1))
        index.grow(tokens)
        at = index.after(tokens)
        if at is None:
            return []
        count = min(room, asked.prompt_lookup_num_tokens or self._options.prompt_lookup_num_tokens)
        return _continued(tokens, at, count)

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._indexes.pop(sequence.id, None)


def _continued(tokens: list[int], at: int, count: int) -> list[int]:
    """`count` tokens from position `at` on; where the text ends, what repeats goes on repeating."""
    period = len(tokens) - at
    return [tokens[at + i % period] for i in range(count)]


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [PromptLookup()]
