"""Checks of drafting strategies, and views of sequences that a plugin can read and not change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from operator import attrgetter, is_
from typing import Any

from jackfield.contracts import Sequence, Strategy
from jackfield.errors import quoted
from jackfield.guarded import fault, guarded

TAIL = 8  # tokens of a sequence that are compared after every call
WHOLE = 1024  # tokens of one that is compared as a whole after some calls

#: What backends read of a sequence and only the loop and the cache may change.
_FIELDS = (
    "id", "prompt_length", "finish_reason", "settings", "tokens", "sample", "leader", "group",
    "constraint", "detokenizer", "drafted", "error", "score", "arrival", "passed_over",
)  # fmt: skip


@functools.cache
def _state_of(kind: type[Sequence], but_cached: bool) -> Callable[[object], tuple[Any, ...]]:
    """What reads these fields of a sequence; one of a draft model has fewer of them."""
    own = [name for name in _FIELDS if hasattr(kind, name)]
    return attrgetter(*own, *(() if but_cached else ("num_cached",)))


def _read(sequence: Sequence) -> tuple[int, list[int]]:
    """How many tokens it has, and the last ones; all of them after 0, 1, 2, 4, 8, … new ones.

    A list of Python's own can be changed behind its back (`list.append(tokens, token)`), and a
    copy of all of it in every call would cost more than the call.
    """
    tokens = sequence.tokens
    length = len(tokens)
    new = length - sequence.prompt_length
    whole = new & (new - 1) == 0 and length <= WHOLE
    return length, tokens[:] if whole else tokens[-TAIL:]


class unchanged:  # noqa: N801 - reads as a word of the language
    """While it is open, a plugin may read `sequences`; PluginError where it changed one of them.

    `but_cached`: how much of them is cached is its to say.
    """

    def __init__(
        self, who: object, what: str, sequences: Seq[Sequence], *, but_cached: bool = False
    ) -> None:
        kind: Any = type(sequences[0]) if sequences else Sequence
        self._state = _state_of(kind, but_cached)
        self._who = who
        self._what = what
        self._sequences = sequences

    def __enter__(self) -> None:
        self._before = list(map(self._state, self._sequences))
        self._tokens = list(map(_read, self._sequences))

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        whole = zip(self._sequences, self._before, self._tokens, strict=True)
        for sequence, before, (length, tokens) in whole:
            same = all(map(is_, self._state(sequence), before))
            now = sequence.tokens
            if not (same and len(now) == length and now[-len(tokens) :] == tokens):
                raise fault(self._who, f"{self._what} changed request {before[0]}, to be read")


class CheckedStrategy(Strategy):
    """`inner`, called `name` in errors; its drafts are token ids below `vocab_size`."""

    def __init__(self, inner: Strategy, name: str, vocab_size: int) -> None:
        self._inner = inner
        self._name = name
        self._vocab_size = vocab_size
        self.min_acceptance_rate = inner.min_acceptance_rate
        self.min_speedup = inner.min_speedup
        if type(self.min_speedup) not in (int, float) or not 0 <= self.min_speedup < math.inf:
            what = quoted(self.min_speedup)
            raise fault(self, f"min_speedup must be a number of 0 or more, not {what}")

    def __str__(self) -> str:
        return self._name

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        sequences, max_drafts = tuple(sequences), tuple(max_drafts)
        with guarded(self, "propose"), unchanged(self, "propose", sequences):
            said = self._inner.propose(sequences, max_drafts)
            # Plain lists: those of a plugin may be of a class of its own, or have no end.
            found = [
                list(islice(drafts, room + 1))
                for drafts, room in zip(said, max_drafts, strict=False)
            ]
            right = len(said) == len(sequences) and all(
                len(drafts) <= room and all(map(self._is_token, drafts))
                for drafts, room in zip(found, max_drafts, strict=True)
            )
        if not right:
            raise fault(
                self,
                f"propose must return {len(sequences)} lists of at most {list(max_drafts)} token "
                f"ids from 0 to {self._vocab_size - 1}; got {quoted(said)}",
            )
        return found

    def refuse(self, prompt_length: int) -> str | None:
        with guarded(self, "refuse"):
            found = self._inner.refuse(prompt_length)
        if type(found) not in (str, type(None)):
            raise fault(self, f"refuse must return a reason or None, got {quoted(found)}")
        return found

    def _is_token(self, token: object) -> bool:
        return type(token) is int and 0 <= token < self._vocab_size

    def release(self, sequences: Seq[Sequence]) -> None:
        sequences = tuple(sequences)
        with guarded(self, "release"), unchanged(self, "release", sequences):
            self._inner.release(sequences)
