"""A tokenizer as the engine uses it, and the way from one model's tokens to another's."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from jackfield.contracts import Sequence
from jackfield.requests.detokenize import Detokenizer, opening
from jackfield.requests.prompts import Prompt, encode
from jackfield.requests.turns import UNSAID, Turn

Lock = contextlib.AbstractContextManager[Any]


class Text:
    """A tokenizer that several threads may use; None: there is none."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # What is written in Rust may be used by many at a time, as long as nobody changes its
        # padding; of what is written in Python nobody knows. Reading a long prompt never holds up
        # the streams, whose text is made at the same time.
        shared = getattr(tokenizer, "is_fast", False)
        if shared:
            tokenizer("")  # type: ignore[misc] # takes off the padding that its file asks for
        self._reading: Lock = contextlib.nullcontext() if shared else threading.Lock()
        self._spelling: Lock = contextlib.nullcontext() if shared else threading.Lock()

    def encode(self, prompt: Prompt, most: int | None = None, turn: Turn = UNSAID) -> list[int]:
        """Token ids of a prompt; a chat ends with `turn`.

        Raises PromptError, early where it has far more than `most`.
        """
        return encode(prompt, self.tokenizer, self.vocab_size, most, self._reading, turn)

    def decode(self, ids: list[int]) -> str:
        with self._spelling:
            text: str = self.tokenizer.decode(  # type: ignore[union-attr]
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def detokenizer(self, stop_strings: Seq[str]) -> Detokenizer:
        """What makes the text of one request as its tokens come."""
        return Detokenizer(self.decode, stop_strings, self._opening)

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        token_of = getattr(self.tokenizer, "convert_tokens_to_ids", None)
        return () if token_of is None else opening(self.decode, token_of)

    def spell(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens and all."""
        with self._spelling:
            text: str = self.tokenizer.decode(  # type: ignore[union-attr]
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return text

    def read(self, text: str) -> list[int]:
        """The ids of `text`, and nothing that a tokenizer would add at its ends."""
        with self._reading:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        return ids


class Bridge(ABC):
    """From the tokens of a model to those of its draft model, and back."""

    #: whether a token means the same to both, so that both can draw by the same random numbers
    same: bool

    @abstractmethod
    def there(self, sequence: Sequence) -> list[int] | None:
        """What the draft model reads; None where there is no way to say it now."""

    @abstractmethod
    def back(self, sequence: Sequence, read: Seq[int], drafts: list[int]) -> list[int]:
        """`drafts`, which follow what the draft model `read`, in the model's own tokens."""


class SameTokens(Bridge):
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


class ByText(Bridge):
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


def bridge(own: Text, other: Text) -> Bridge:
    """The way between two models whose vocabularies were found to go together."""
    if own.tokenizer is None or other.tokenizer is None or same_tokens(own, other):
        return SameTokens(min(own.vocab_size, other.vocab_size))
    return ByText(own, other)


def same_tokens(own: Text, other: Text) -> bool:
    """Whether one tokenizer's tokens are the other's, with the same ids."""
    mine: dict[str, int] = own.tokenizer.get_vocab()  # type: ignore[union-attr]
    theirs: dict[str, int] = other.tokenizer.get_vocab()  # type: ignore[union-attr]
    return mine.items() <= theirs.items() or theirs.items() <= mine.items()
