"""Text from tokens as they come, never half a character and never part of a stop string.

The window of two offsets over the token ids follows text-generation-inference
(`decode_token` in its `models/model.py`): decoding a token depends on what stands before it, so the
new text is the difference of two decodings that share their beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns the new tokens of one request into text.

    `decode` maps token ids to text (special tokens left out). `opening`: tokens that make another
    text of what stands before them, where it is not certain yet; in a tokenizer with byte fallback
    a byte of no character, since a run of bytes is text only where all of it is. `skipped`: tokens
    that `decode` takes out before it looks at the others, so that many of them cost nothing.
    `stopped` becomes True when one of `stop_strings` appears; the text ends before it. The text is
    what `decode` makes of all tokens, and what was shown is its beginning.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_strings: Sequence[str] = (),
        opening: Sequence[int] = (),
        skipped: Container[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._stops = tuple(stop_strings)
        self._opening = list(opening)
        self._ids: list[int] = []  # that are not skipped
        self._prefix = 0  # where the window begins
        self._read = 0  # tokens before this one are in `_text`
        self._prefix_text = ""
        self._text = ""  # of the certain tokens; shown or held back
        self._shown = 0  # how much of `_text` was returned
        self._pending = 0  # characters of the text that are not certain
        self.stopped = False

    def copy(self) -> Detokenizer:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return self._text[: self._shown]

    @property
    def reach(self) -> int:
        """How long the text is with all that is held back, as far as that is known."""
        return len(self._text) + self._pending

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is certain now."""
        self._ids.extend(token for token in tokens if token not in self._skipped)
        window = self._decode(self._ids[self._prefix :])
        if len(window) > len(self._prefix_text) and self._is_certain(window):
            self._text += window[len(self._prefix_text) :]
            self._prefix, self._read = self._read, len(self._ids)
            self._prefix_text = self._decode(self._ids[self._prefix :])
            self._pending = 0
            self._stop(self._text)
        else:  # a stop string counts as soon as it is there: the text may end with it
            self._pending = max(len(window) - len(self._prefix_text), 0)
            self._stop(self._text + window[len(self._prefix_text) :].rstrip(_REPLACEMENT))
        if self.stopped:
            return self._show(len(self._text))
        pending = self._text[self._shown :]
        beginning = (stop for stop in self._stops if stop[0] in pending)
        held = max((overlap(pending, stop) for stop in beginning), default=0)
        return self._show(len(self._text) - held)

    def finish(self) -> str:
        """No more tokens come: returns the rest, incomplete characters as U+FFFD.

        Raises ValueError where a part of the text is not what it was when it was shown.
        """
        if self.stopped:
            return ""
        whole = self._decode(self._ids)
        if not whole.startswith(self.text):
            raise ValueError(
                "the tokenizer makes another text of the first tokens when more follow; use "
                "generate, without stop strings, where all are decoded at once"
            )
        self._text = whole
        self._stop(whole)
        return self._show(len(self._text))

    def _is_certain(self, window: str) -> bool:
        """Whether no token that follows can change a character of `window`."""
        # A replacement character at the end is half of a character that the next token completes.
        if window.endswith(_REPLACEMENT):
            return False
        if not self._opening:
            return True
        return self._decode([*self._ids[self._prefix :], *self._opening]).startswith(window)

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start : self._shown]

    def _stop(self, text: str) -> None:
        """Look for a stop string in what of `text` was not shown; where one is, the text ends.

        Of several, the one that is whole first counts: however the text comes in pieces, the same.
        """
        pending = text[self._shown :]
        found = [stop for stop in self._stops if stop in pending]
        if hits := [(at + len(stop), at) for stop in found for at in [pending.find(stop)]]:
            self.stopped = True
            self._text = text[: self._shown + min(hits)[1]]


def opening(
    decode: Callable[[list[int]], str], token_of: Callable[[str], int | None]
) -> tuple[int, ...]:
    """What a `Detokenizer` needs as its `opening`: a byte that no character begins or ends with.

    `token_of` says the id of a piece. Empty: the tokenizer does not fall back on bytes.
    """
    for byte in range(0xFF, 0x7F, -1):
        token = token_of(f"<0x{byte:02X}>")
        if token is not None and decode([token]) == _REPLACEMENT:
            return (token,)
    return ()


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
