"""How many multiplications and additions it takes to read a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptFlops:
    """What products of matrices take; all else is left out, so that it is never too much.

    `token` is for each token, `once` for what only the last one needs: the logits. `attentions`
    are (for one query and one key, all heads together; its window, or None), of each layer.
    """

    token: int
    once: int
    attentions: tuple[tuple[int, int | None], ...]

    def of(self, tokens: int) -> int:
        """Of a prompt of so many tokens, none of them cached."""
        pairs = sum(each * _pairs(tokens, window) for each, window in self.attentions)
        return self.token * tokens + self.once + pairs


def _pairs(tokens: int, window: int | None) -> int:
    """How many keys all queries see together: each itself and those before it, in its window."""
    seen = tokens if window is None else min(tokens, window)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen
