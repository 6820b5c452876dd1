"""Translates tokens between the vocabularies of a model and its draft model, by their text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from jackfield.bridge.tokenizer import Text, same_tokens
from jackfield.contracts import Sequence


class TokenTranslator(ABC):
    """From the tokens of a model to those of its draft model, and back."""

    #: whether a token means the same to both, so that both can draw by the same random numbers
    same: bool

    @abstractmethod
    def there(self, sequence: Sequence) -> list[int] | None:
        """What the draft model reads; None where there is no way to say it now."""

    @abstractmethod
    def back(self, sequence: Sequence, read: Seq[int], drafts: list[int]) -> list[int]:
        """`drafts`, which follow what the draft model `read`, in the model's own tokens."""


class SameTokens(TokenTranslator):
    """One vocabulary; the output heads may be padded to different sizes."""

    same = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size  # the smaller one's

    def there(self, sequence: Sequence) -> list[int] | None:
        known = max(sequence.tokens) < self._vocab_size
        return list(sequence.tokens) if known else None

    def back(self, sequence: Sequence, read: Seq[int], drafts: list[int]) -> list[int]:
        stray = (i for i, token in enumerate(drafts) if token >= self._vocab_size)
        return drafts[: next(stray, len(drafts))]


class ByText(TokenTranslator):
    """Two tokenizers: what one says is spelt out and read by the other.

    Universal assisted decoding (Timor et al. 2025, arXiv:2502.05202, there "string-level exact
    match"): a draft is only a guess, so it may be cut otherwise than the model would cut it.
    """

    same = False

    def __init__(self, own: Text, other: Text) -> None:
        self._own = own
        self._other = other
        self._begin = [bos] if (bos := other.tokenizer.bos_token_id) is not None else []  # type: ignore[union-attr]
        self._end = other.tokenizer.eos_token_id  # type: ignore[union-attr]

    def there(self, sequence: Sequence) -> list[int] | None:
        text = self._own.spell(sequence.tokens)
        if not text or text.endswith("\ufffd"):  # half a character
            return None
        read = [*self._begin, *self._other.read(text)]
        known = max(read, default=self._other.vocab_size) < self._other.vocab_size
        return read if known else None  # such as a token that was added

    def back(self, sequence: Sequence, read: Seq[int], drafts: list[int]) -> list[int]:
        ends = self._end in drafts
        if ends:
            drafts = drafts[: drafts.index(self._end)]
        before = self._other.spell(list(read))
        text = self._other.spell([*read, *drafts])
        if not text.startswith(before):
            return []
        said = self._own.read(text[len(before) :].rstrip("\ufffd")) if drafts else []
        return said + list(sequence.settings.eos_token_ids[:1] if ends else ())


def translator(own: Text, other: Text) -> TokenTranslator:
    """The way between two models whose vocabularies were found to go together."""
    if own.tokenizer is None or other.tokenizer is None or same_tokens(own, other):
        return SameTokens(min(own.vocab_size, other.vocab_size))
    return ByText(own, other)
