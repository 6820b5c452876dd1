"""Text from tokens as they come, never half a character and never part of a stop string.

The window of two offsets over the token ids follows text-generation-inference
(`decode_token` in its `models/model.py`): decoding a token depends on what stands before it, so the
new text is the difference of two decodings that share their beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns the new tokens of one request into text.

    `decode` maps token ids to text (special tokens left out). `stopped` becomes True when one of
    `stop_strings` appears; the text ends before it.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._ids: list[int] = []
        self._prefix = 0  # where the window begins
        self._read = 0  # tokens before this one are in `_text`
        self._prefix_text = ""
        self._text = ""  # complete characters, shown or held back
        self._shown = 0  # how much of `_text` was returned
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

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is certain now."""
        self._ids.extend(tokens)
        window = self._decode(self._ids[self._prefix :])
        # A replacement character at the end is half of a character that the next token completes.
        if window.endswith(_REPLACEMENT) or len(window) <= len(self._prefix_text):
            return ""
        self._take(window)
        return self._show(self._certain())

    def finish(self) -> str:
        """No more tokens come: returns the rest, incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        window = self._decode(self._ids[self._prefix :])
        if len(window) > len(self._prefix_text):
            self._take(window)
        self._certain()
        return self._show(len(self._text))

    def _take(self, window: str) -> None:
        self._text += window[len(self._prefix_text) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._prefix_text = self._decode(self._ids[self._prefix : self._read])

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start : self._shown]

    def _certain(self) -> int:
        """Where the text ends that cannot become part of a stop string; looks for a whole one.

        Of several, the one that is whole first counts: however the text comes in pieces, the same.
        """
        pending = self._text[self._shown :]
        found = ((pending.find(stop), len(stop)) for stop in self._stops)
        if hits := [(at + length, at) for at, length in found if at >= 0]:
            self.stopped = True
            self._text = self._text[: self._shown + min(hits)[1]]
            return len(self._text)
        held = max((_overlap(pending, stop) for stop in self._stops), default=0)
        return len(self._text) - held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
