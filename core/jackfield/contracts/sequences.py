"""A sequence is its tokens and how many of them are cached. A step feeds some more of them.

Prefill, chunked prefill, decode, verifying drafts and prefill after a preemption are then the
same thing: feed n more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from jackfield.contracts.settings import Settings


def _refused(self: Tokens, *_: object) -> NoReturn:
    raise TypeError("the tokens of a sequence are for reading; copy them first: list(tokens)")


class Tokens(list[int]):
    """A list that only its owner changes, by `list`'s own methods: ``list.append(tokens, token)``.

    Backends are handed it as it is; what they try to change in it raises TypeError.
    """

    __slots__ = ()
    append = extend = insert = remove = pop = clear = reverse = __delitem__ = __imul__ = _refused
    sort = __setitem__ = __iadd__ = _refused  # type: ignore[assignment]


class Sequence:
    """One text of a request, as a backend sees it while it runs.

    A request has one sequence, several samples of its prompt, or a group of beams. Everything is
    for reading, but for `num_cached`, which the cache sets; a backend that changes anything else
    ends the request with a PluginError.

    `id`: unique in an engine. `tokens`: prompt and new ones; a list that grows, so copy what is to
    stay. `prompt_length`: how many of them are the prompt. `num_cached`: how many of them, from
    the first on, the cache holds. `settings`: what the request asked for. `sample`: tells apart
    the sequences that continue one prompt; all but the first have it as their `leader`. `group`:
    the beams of a request that is searched. `arrival`: the loop's step before which it came.
    `evictions`: how often its memory was taken from it.
    """

    __slots__ = (
        "arrival", "evictions", "group", "id", "leader", "num_cached", "prompt_length", "sample",
        "settings", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: Seq[int],
        settings: Settings,
        *,
        leader: Sequence | None = None,
        sample: int = 0,
    ) -> None:
        self.id = number
        self.tokens: list[int] = Tokens(prompt)
        self.prompt_length = len(self.tokens)
        self.num_cached = 0
        self.settings = settings
        self.leader = leader
        self.sample = sample
        self.group: BeamGroup | None = None
        self.arrival = 0
        self.evictions = 0

    @property
    def members(self) -> Seq[Sequence]:
        """Itself, or all of the group that it ends with."""
        return (self,) if self.group is None else self.group.members

    @property
    def num_new(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def new_tokens(self) -> list[int]:
        """A copy of the tokens that were generated so far."""
        return self.tokens[self.prompt_length :]


class Hypothesis(NamedTuple):
    """A text that is complete: its new tokens, and the score by which it is ranked."""

    tokens: tuple[int, ...]
    score: float


class BeamGroup(Protocol):
    """The sequences of one request under a `Search`; for reading.

    `members`: as many sequences as there can be beams. `beams`: those that go on, in the order of
    the last decision, with their `scores`; at first one, which reads the prompt. `hypotheses`: the
    texts that are complete, best first. It is hashable, by identity.
    """

    @property
    def members(self) -> Seq[Sequence]: ...
    @property
    def beams(self) -> Seq[Sequence]: ...
    @property
    def scores(self) -> Seq[float]: ...
    @property
    def hypotheses(self) -> Seq[Hypothesis]: ...
    @property
    def settings(self) -> Settings: ...

    @property
    def width(self) -> int:
        """How many beams there can be."""

    @property
    def num_new(self) -> int:
        """How many new tokens every beam has."""

    def new_tokens(self, parent: int, token: int) -> tuple[int, ...]:
        """The new tokens of beam number `parent`, and `token`."""

    def ends(self, parent: int, token: int) -> bool:
        """Whether the text of beam number `parent` is complete with `token`.

        By an EOS token, by its length, by a stop string, or by what it must look like.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence's part of a step: its tokens from `start`, `count` of them, then `drafts`."""

    sequence: Sequence
    start: int
    count: int
    drafts: Seq[int] = ()

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.start + self.count], *self.drafts]

    @property
    def samples(self) -> bool:
        """Whether the feed reaches the end of its sequence, so that a next token is wanted."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward call computes: which sequence feeds how many tokens."""

    feeds: Seq[Feed]

    @property
    def decode(self) -> bool:
        """Whether every sequence feeds one token, and its drafts."""
        return all(feed.count == 1 for feed in self.feeds)
