"""Names for what pages hold: equal keys mean equal tokens before and in a page."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jackfield.contracts import Sequence

_SIZE = 16  # bytes: two prompts with equal keys cannot be found on purpose


class PrefixKeys:
    """The keys of the full pages of each running sequence, a chain of hashes (as in vLLM).

    A pool belongs to one model with one plan, so weights and plan need not be in a key; the salt of
    a request is.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._chains: dict[int, list[bytes]] = {}

    def of(self, sequence: Sequence, pages: int) -> list[bytes]:
        """The keys of its first `pages` pages, at least; all of their tokens are there."""
        chain = self._chains.setdefault(sequence.id, [])
        if not chain:
            salt = sequence.settings.cache_salt.encode()
            chain.append(blake2b(salt, digest_size=_SIZE, person=b"salt").digest())
        for page in range(len(chain) - 1, pages):
            tokens = sequence.tokens[page * self._page_size : (page + 1) * self._page_size]
            data = chain[-1] + array("q", tokens).tobytes()
            chain.append(blake2b(data, digest_size=_SIZE).digest())
        return chain[1:]

    def fork(self, source: Sequence, into: Sequence) -> None:
        """`into` begins with the tokens of `source`."""
        if source.id in self._chains:
            self._chains[into.id] = list(self._chains[source.id])

    def drop(self, sequence: Sequence) -> None:
        self._chains.pop(sequence.id, None)
