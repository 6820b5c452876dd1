"""Requests of a simulation: how many tokens they have, not which."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from jackfield.contracts import Sequence, Settings
from jackfield.replicas.prefixes import ends

_PLAIN = Settings(max_new_tokens=1)
BLOCK = 16  # tokens in the 64 characters that routing looks at together


class Tokens:
    """As many tokens as there are, and no more of them than that."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class Request(Sequence):
    """One request: `topic` is what its first `shared` tokens have in common with others.

    `came` is when its client sent it, `first` and `ended` when it got its first and its last
    token; `poison`: it ends the process that reads it, where the kernel is the bad one.
    """

    __slots__ = (
        "blocks", "came", "ended", "fate", "first", "poison", "shared", "topic", "tries", "wanted",
    )  # fmt: skip

    def __init__(
        self, number: int, topic: int, shared: int, own: int, wanted: int, came: float
    ) -> None:
        self.id = number
        self.tokens = Tokens(shared + own)  # type: ignore[assignment]
        self.prompt_length = shared + own
        self.num_cached = 0
        self.settings = _PLAIN
        self.leader = self.group = None
        self.sample = self.preemptions = self.tries = 0
        self.arrival = self.came = came
        self.topic, self.shared, self.wanted = topic, shared, wanted
        self.first: float | None = None
        self.ended: float | None = None
        self.fate = "open"
        self.poison = False
        self.blocks = tuple(
            hash((topic, 0, at) if at <= shared else (0, number, at))
            for at in ends(self.prompt_length, BLOCK)
        )

    @property
    def left(self) -> int:
        """How many tokens it still gets."""
        return self.wanted - (len(self.tokens) - self.prompt_length)

    def again(self, now: float) -> None:
        """It goes to another replica, which knows nothing of it."""
        self.tokens.count = self.prompt_length  # type: ignore[attr-defined]
        self.num_cached, self.arrival = 0, now
        self.tries += 1


@dataclass(frozen=True)
class Traffic:
    """Requests that come at random, `rate` a second.

    A share `talking` of them goes on in a conversation, or begins with instructions that many
    have: one of `topics`, drawn by Zipf's law. Lengths are log-normal, in tokens.
    """

    rate: float
    topics: int
    talking: float = 0.7
    shared: int = 1500
    own: int = 300
    wanted: int = 250
    poison: float = 0.0

    def requests(self, seconds: float, seed: int) -> Iterator[Request]:
        """All that come within `seconds`, one after the other."""
        draw, now, number = random.Random(seed), 0.0, 0
        while (now := now + draw.expovariate(self.rate)) < seconds:
            number += 1
            topic = int(self.topics ** draw.random())  # 1/rank
            shared = self._shared(topic) if draw.random() < self.talking else 0
            own, wanted = _about(draw, self.own), _about(draw, self.wanted)
            request = Request(number, topic if shared else 0, shared, own, wanted, now)
            request.poison = draw.random() < self.poison
            yield request

    def _shared(self, topic: int) -> int:
        """How long the common beginning of a topic is: always the same."""
        return _about(random.Random(topic), self.shared)


def _about(draw: random.Random, mean: int, spread: float = 0.7) -> int:
    return max(1, min(8 * mean, round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread))))
