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

    Backends get the list itself; an attempt to change it raises TypeError.
    """

    __slots__ = ()
    append = extend = insert = remove = pop = clear = reverse = __delitem__ = __imul__ = _refused
    sort = __setitem__ = __iadd__ = _refused  # type: ignore[assignment]


class Sequence:
    """One text of a request, as a backend sees it while it runs.

    A request has one sequence, several samples of its prompt, or a group of beams. With guidance it
    has two for each text: one behind its prompt, and one that gets the same new tokens behind the
    negative prompt; they feed their last tokens in the same steps. Everything is for reading, but
    for `num_cached`, which the cache sets.

    Lives: from `admit` or the first `key` to `release`; compare sequences by identity or `id`.

    Violations: a backend that changes anything else in one is a PluginError, and every open
    request ends. It is looked for in calls of schedules, of strategies, and of caches that are not
    jackfield's own; of a text's tokens mostly the last are compared, now and then all.

    Attributes:
        id: Unique in an engine.
        tokens: Prompt and new ones; a list that grows, so copy what is to stay.
        prompt_length: How many of them are the prompt.
        num_cached: How many of them, from the first on, the cache holds.
        settings: What the request asked for.
        sample: Tells apart the texts that continue one prompt, from 0 on.
        leader: The first of those, for all others; None: it is the first.
        group: The beams of a request that is searched; None: it is not.
        arrival: When it came, in seconds of the schedulers' clock (`now`).
        preemptions: How often its memory was taken from it.
    """

    __slots__ = (
        "arrival",
        "group",
        "id",
        "leader",
        "num_cached",
        "preemptions",
        "prompt_length",
        "sample",
        "settings",
        "tokens",
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
        self.arrival = 0.0
        self.preemptions = 0

    @property
    def members(self) -> Seq[Sequence]:
        """Itself, or all that it ends with: its group, or with guidance its pair."""
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
    """A text that is complete.

    Attributes:
        tokens: Its new tokens, one at least; the last one ends it.
        score: By which it is ranked; higher is better, a finite number.
    """

    tokens: tuple[int, ...]
    score: float


class BeamGroup(Protocol):
    """The sequences of one request under a `Search`; for reading.

    It is hashable, by identity, and stays the same object from the request's first step to its
    last. A search that changes one is a PluginError.
    """

    @property
    def members(self) -> Seq[Sequence]:
        """As many sequences as there can be beams."""

    @property
    def beams(self) -> Seq[Sequence]:
        """Those that go on, in the order of the last decision; at first one, which read the prompt.

        A parent's number is its place in here.
        """

    @property
    def scores(self) -> Seq[float]:
        """One for each of `beams`, from the last decision; 0 at first."""

    @property
    def hypotheses(self) -> Seq[Hypothesis]:
        """The texts that are complete, best first, as the last decision left them."""

    @property
    def settings(self) -> Settings:
        """What the request asked for."""

    @property
    def width(self) -> int:
        """How many beams there can be."""

    @property
    def num_new(self) -> int:
        """How many new tokens every beam has."""

    def new_tokens(self, parent: int, token: int) -> tuple[int, ...]:
        """The new tokens of beam number `parent`, and `token` behind them."""

    def ends(self, parent: int, token: int) -> bool:
        """Whether the text of beam number `parent` is complete with `token`.

        By an EOS token, by its length, by a stop string, or by what it must look like.
        """


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: its tokens from `start`, `num_tokens` of them, then `drafts`.

    Attributes:
        sequence: Whose part it is.
        start: Its `num_cached`: the position of the first token that is fed.
        num_tokens: How many of its own tokens are fed; 0 only in a cache with `continuous = False`.
        drafts: Token ids that are fed behind its last own token, to be verified; none otherwise.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: Seq[int] = ()

    @property
    def token_ids(self) -> list[int]:
        """What is fed: its own tokens, then the drafts. A list of its own, made in each call."""
        return [*self.sequence.tokens[self.start : self.start + self.num_tokens], *self.drafts]

    @property
    def samples(self) -> bool:
        """Whether it reaches the end of its sequence, so that a next token is wanted."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward call computes: which sequence feeds how many tokens.

    Attributes:
        scheduled: One for each sequence that takes part, in the order of the logits' rows.
    """

    scheduled: Seq[ScheduledSequence]

    @property
    def decode(self) -> bool:
        """Whether every sequence feeds one token, and its drafts."""
        return all(item.num_tokens == 1 for item in self.scheduled)
