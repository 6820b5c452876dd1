"""A tokenizer as the engine uses it."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from jackfield.bridge.encoding import encode
from jackfield.contracts import Settings
from jackfield.requests.chat_settings import UNSAID, ChatSettings
from jackfield.requests.detokenize import Detokenizer, opening
from jackfield.requests.prompts import Prompt

if TYPE_CHECKING:
    from jackfield.bridge.image_chats import Places

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

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

    def encode(
        self,
        prompt: Prompt,
        most: int | None = None,
        chat: ChatSettings = UNSAID,
        images: Places | None = None,
    ) -> list[int]:
        """Token ids of a prompt; `chat` is what is said of one beside its messages and `images`.

        Raises PromptError, early where it has far more than `most`.
        """
        return encode(prompt, self.tokenizer, self.vocab_size, most, self._reading, chat, images)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, without special tokens."""
        with self._spelling:
            text: str = self.tokenizer.decode(  # type: ignore[union-attr]
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def decoder(self, settings: Settings) -> Callable[[list[int]], str]:
        """What makes text of the new tokens of a request.

        Where it asks for special tokens, all but the EOS that ends it.
        """
        if settings.skip_special_tokens:
            return self.decode
        ends = self._ends(settings)
        return lambda ids: self.spell([token for token in ids if token not in ends])

    def _ends(self, settings: Settings) -> frozenset[int]:
        return frozenset(token for token in settings.eos_token_ids if not self.decode([token]))

    def detokenizer(self, settings: Settings) -> Detokenizer:
        """What makes the text of one request as its tokens come."""
        skipped = self._special if settings.skip_special_tokens else self._ends(settings)
        return Detokenizer(self.decoder(settings), settings.stop_strings, self._opening, skipped)

    @cached_property
    def _special(self) -> frozenset[int]:
        """The tokens that `decode` leaves out."""
        if getattr(self.tokenizer, "is_fast", False):
            added = self.tokenizer.added_tokens_decoder.items()  # type: ignore[union-attr]
            found = {token for token, made in added if made.special}
        else:
            found = set(getattr(self.tokenizer, "all_special_ids", ()))
        return frozenset(token for token in found if not self.decode([token]))

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

    def bytes_of(self, token: int) -> bytes:
        """The text of one token as UTF-8, also where it is a part of a character."""
        text = self.spell([token])
        piece = str(self.tokenizer.convert_ids_to_tokens(token))  # type: ignore[union-attr]
        if _UNKNOWN in text:
            return part_of_a_character(piece) or text.encode()
        if piece.startswith(_SPACE) and not text.startswith(" "):  # which decoding alone strips
            text = f" {text}"
        return text.encode()

    def read(self, text: str) -> list[int]:
        """The ids of `text`, and nothing that a tokenizer would add at its ends."""
        with self._reading:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        return ids


def part_of_a_character(piece: str) -> bytes | None:
    """The bytes that a tokenizer calls `piece`: ``<0xE2>``, or GPT-2's letters for bytes."""
    if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(found[1])
    letters = _letters()
    return bytes(letters[c] for c in piece) if set(piece) <= letters.keys() else None


@cache
def _letters() -> dict[str, int]:
    """GPT-2's letter of each byte: itself where it can be printed, else one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + n): b for n, b in enumerate(others)}


def same_tokens(own: Text, other: Text) -> bool:
    """Whether one tokenizer's tokens are the other's, with the same ids."""
    mine: dict[str, int] = own.tokenizer.get_vocab()  # type: ignore[union-attr]
    theirs: dict[str, int] = other.tokenizer.get_vocab()  # type: ignore[union-attr]
    return mine.items() <= theirs.items() or theirs.items() <= mine.items()
