"""Sequences as an engine lends them to a backend, and what the backend changed in them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from jackfield.contracts import Sequence, Settings
from jackfield.testing.checks import WrongError

_FIELDS = (
    "id", "prompt_length", "num_cached", "settings", "sample", "leader", "group", "arrival",
    "preemptions",
)  # fmt: skip


class Lent(Sequence):
    """A sequence of the kit's own, which has no slots: it can be referred to weakly."""


def lend(
    number: int, prompt: Seq[int], *, num_cached: int = 0, arrival: float = 0.0, **settings: Any
) -> Lent:
    """A new sequence; `settings` are fields of `Settings`."""
    asked = Settings(**{"max_new_tokens": 64, **settings})
    sequence = Lent(number, prompt, asked)
    sequence.num_cached, sequence.arrival = num_cached, arrival
    return sequence


def grow(sequence: Sequence, tokens: Iterable[int]) -> None:
    """What was generated goes behind its tokens, as the loop does it; all but the last is cached.

    Backends cannot call these methods by mistake: `Tokens` refuses them.
    """
    for token in tokens:
        list.append(sequence.tokens, token)
    sequence.num_cached = len(sequence.tokens) - 1


class Watch:
    """Sequences that nobody may change from now on, until `check`."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self._known = [(s, _state(s), s.tokens, list(s.tokens)) for s in sequences]

    def check(self, what: str) -> None:
        """Raise WrongError that names the field which the call `what` changed."""
        for sequence, before, tokens, copied in self._known:
            number = before["id"]
            if sequence.tokens is not tokens:
                raise WrongError(f"{what} replaced the tokens of request {number}, to be read")
            if tokens != copied:
                raise WrongError(f"{what} changed request {number}: {_difference(copied, tokens)}")
            for name, value in _state(sequence).items():
                if value is not before[name] and value != before[name]:
                    raise WrongError(
                        f"{what} changed request {number}, to be read: {name} was "
                        f"{before[name]!r:.60} and is {value!r:.60}"
                    )


def _state(sequence: Sequence) -> dict[str, Any]:
    state = {name: getattr(sequence, name, None) for name in _FIELDS}
    return state | {f"its {name}": value for name, value in vars(sequence).items()}


def _difference(before: list[int], now: list[int]) -> str:
    if len(before) != len(now):
        return f"it had {len(before)} tokens and has {len(now)}"
    at = next(i for i, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
    return f"token {at} was {before[at]} and is {now[at]}"
