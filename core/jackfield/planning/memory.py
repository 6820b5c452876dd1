"""What a step leaves free, and how many requests fit beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jackfield.contracts.requirements import BYTES, Requirements
from jackfield.units import in_units

#: Of a step in the packed layout, and the sequences that run together, where nothing else is asked.
STEP_TOKENS, STEP_ROWS = 2048, 32

#: What the sampler takes for each logit beside it, in bytes: all settings at once, in float32. Most
#: of it is the float64 of a draw (16), copies for each stage (4), and a sort with its indices (12).
SAMPLING = 48


@dataclass(frozen=True)
class StepLimits:
    """How much a step computes at most: `tokens` that are fed, the next tokens of `rows` sequences.

    Each sequence has up to `drafts` drafts, which come on top.
    """

    tokens: int = STEP_TOKENS
    rows: int = STEP_ROWS
    drafts: int = 0


@dataclass(frozen=True)
class PlannedHeads:
    """A model's own heads for multi-token prediction, which its decodings draft with.

    `layers` of them; their weights take `weight_bytes`, a token that they have read `token_bytes`
    in all of them.
    """

    layers: int
    weight_bytes: int
    token_bytes: int

    def __str__(self) -> str:
        count = f"{self.layers} head{'s' if self.layers > 1 else ''}"
        return (
            f"{count} for multi-token prediction, {in_units(self.weight_bytes)}, and "
            f"{self.token_bytes:,} bytes for each token of a text"
        )


def step_bytes(needs: Requirements, limits: StepLimits) -> int:
    """What to leave free for a step beside weights and cache, in bytes; on the CPU nothing is.

    It is more than a dry run shows, and than the sampler takes of any settings. In the packed
    layout the states of layers are in it, which no cache has in its pools.
    """
    if needs.device == "cpu":
        return 0
    size, (vocabulary, _) = BYTES[needs.dtype], needs.head or (0, 0)
    fed = (limits.tokens + limits.rows * limits.drafts) * needs.token_numbers * size
    logits = limits.rows * (1 + limits.drafts) * vocabulary * sampled_bytes(needs.dtype)
    states = limits.rows * (needs.state_bytes or 0) if needs.layout == "packed" else 0
    return fed + logits + states


def sampled_bytes(dtype: str) -> int:
    """What a logit takes until tokens are chosen, itself included, in bytes."""
    size = BYTES[dtype]
    return size + SAMPLING * max(size, BYTES["float32"]) // BYTES["float32"]


@dataclass(frozen=True)
class CacheMemory:
    """What the keys and values of a plan cost, and what fits.

    `available` bytes are there for them: the pool where it is fixed, otherwise what is free on the
    device, less the weights. `request_bytes` maps a request's tokens, prompt and new ones together,
    to the bytes that it holds at most. `needed` maps the tokens of each request and how many
    requests there are to all that they need at once; None: what they hold.
    """

    available: int
    context_length: int | None
    request_bytes: Callable[[int], int]
    needed: Callable[[int, int], int] | None = None

    @property
    def bytes_per_token(self) -> int:
        """What a short request costs per token, before any window is full; pages counted whole."""
        return -(-self.request_bytes(1024) // 1024)

    @property
    def grows(self) -> bool:
        """Whether longer requests take more; those of models that only keep states do not."""
        return self.request_bytes(1 << 20) > self.request_bytes(1)

    def fits(self, tokens: int, requests: int) -> bool:
        """Whether that many requests of `tokens` tokens fit together."""
        if self.needed is not None:
            return self.needed(tokens, requests) <= self.available
        return requests * self.request_bytes(tokens) <= self.available

    def requests(self, tokens: int) -> int:
        """How many requests of `tokens` tokens fit together."""
        most = self.available // self.request_bytes(tokens)
        return _largest(most, lambda count: self.fits(tokens, count))

    @property
    def longest(self) -> int:
        """The longest single request that fits, in tokens, prompt and new ones together."""
        most = self.context_length or self.available + 1
        return _largest(most, lambda tokens: self.fits(tokens, 1))

    def to_dict(self) -> dict[str, Any]:
        return {
            "available_bytes": self.available,
            "bytes_per_token": self.bytes_per_token,
            "longest_request": self.longest,
            "requests_that_fit": {tokens: self.requests(tokens) for tokens in self._lengths()},
        }

    def _lengths(self) -> list[int]:
        most = self.longest
        return [n for n in (256, 1024, 4096, 16384, 65536) if n < most] + ([most] if most else [])

    def __str__(self) -> str:
        if not self.grows:
            return (
                f"{in_units(self.request_bytes(1))} a request, however long, "
                f"{in_units(self.available)} for them: {self.requests(1)} fit together"
            )
        fit = ", ".join(f"{self.requests(n)} of {n}" for n in self._lengths())
        return (
            f"{self.bytes_per_token} bytes a token, {in_units(self.available)} for them: "
            f"requests that fit together, by their tokens: {fit or 'none'}"
        )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, 0 for none; larger ones fit less."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
