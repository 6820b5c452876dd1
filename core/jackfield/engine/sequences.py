"""A sequence is its tokens and how many of them are in the cache. A step feeds some more of them.

Prefill, chunked prefill, decode, verifying drafts and re-prefill after an eviction are then the
same thing: feed n more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jackfield.sampling.drafted import Drafted
from jackfield.sampling.fenced import OwnFailure, met

if TYPE_CHECKING:
    from jackfield.contracts import Accepted
    from jackfield.engine.groups import Group
    from jackfield.engine.report import Report
    from jackfield.requests.detokenize import Detokenizer
    from jackfield.requests.settings import Settings
    from jackfield.sampling.structured import Constraint

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model itself, before any setting is applied.

    `top` holds (token id, log-probability) of the likeliest tokens, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
    """One request while it runs. The loop and the cache mutate it; nobody else does.

    `tokens` holds prompt and new tokens; the first `num_cached` of them are in the cache.
    `constraint` says what may follow them, where the text is to have a structure. `sample` tells
    apart the sequences that continue one prompt; all but the first have it as their `leader`.
    `group` holds the sequences of a request that is searched, and `score` what the search found
    of this one.
    `arrival` is the loop's step before which the sequence came; `passed_over` counts turns of its
    that others got. Times are in seconds of
    `time.perf_counter`.
    """

    __slots__ = (
        "arrival", "constraint", "detokenizer", "drafted", "error", "evictions", "finish_reason",
        "first_token_at", "group", "id", "leader", "logprobs", "num_cached", "passed_over",
        "prompt_length", "report_before", "sample", "score", "settings", "started", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: Seq[int],
        settings: Settings,
        detokenizer: Detokenizer | None,
        leader: Sequence | None = None,
        sample: int = 0,
    ) -> None:
        self.id = number
        self.leader = leader
        self.sample = sample
        self.group: Group | None = None
        self.score: float | None = None
        self.arrival = 0
        self.evictions = 0
        self.passed_over = 0
        self.drafted = Drafted()
        self.first_token_at: float | None = None
        self.tokens: list[int] = Tokens(prompt)
        self.prompt_length = len(self.tokens)
        self.num_cached = 0
        self.settings = settings
        self.constraint: Constraint | None = None
        self.detokenizer = detokenizer
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] = []
        self.started = time.perf_counter()
        self.report_before: Report | None = None  # what had run when the request came

    @property
    def deadline(self) -> float | None:
        """When the request must have ended; None: whenever."""
        wanted = self.settings.deadline
        return None if wanted is None else self.started + wanted

    @property
    def together(self) -> Seq[Sequence]:
        """Itself, or all of the group that it ends with."""
        return (self,) if self.group is None else self.group.members

    @property
    def num_new(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def text_tokens(self) -> list[int]:
        """The new tokens that the text is made of."""
        new = self.new_tokens
        return new[:-1] if new and self._only_ends(new[-1]) else new

    def _only_ends(self, token: int) -> bool:
        """Whether `token` is no text here: an end that could be text is none in a structure."""
        settings = self.settings
        return settings.structure is not None and token in settings.eos_token_ids

    def extend(
        self, tokens: Seq[int], logprobs: Seq[TokenLogprob], *, ends: bool = False
    ) -> tuple[list[int], str]:
        """Append what a step accepted, up to the first reason to finish; `ends`: it is whole then.

        Returns the tokens that were taken and the text that may be shown now.
        """
        taken: list[int] = []
        text = ""
        for token in tokens:
            list.append(self.tokens, token)
            taken.append(token)
            if self.detokenizer is not None and not self._only_ends(token):
                text += self.detokenizer.push([token])
            if self._finishes(token):
                break
        if ends and len(taken) == len(tokens) and self.finish_reason in (None, "length"):
            self.finish_reason = "stop"
        self.logprobs.extend(logprobs[: len(taken)])
        if self.detokenizer is not None and self.finish_reason is not None:
            text += self.detokenizer.finish()
            if self.detokenizer.stopped and self.finish_reason == "length":
                self.finish_reason = "stop"
        return taken, text

    def fail(self, why: str | OwnFailure) -> None:
        """End it by an error."""
        self.finish_reason, self.error = "error", str(why)

    def flush(self) -> str:
        """The text that was held back, of a sequence that ends early."""
        return "" if self.detokenizer is None else self.detokenizer.finish()

    def _finishes(self, token: int) -> bool:
        """Whether `token` ends it; what has failed already takes what it gained all the same."""
        before, self.finish_reason = self.finish_reason, None
        stopped = self.detokenizer is not None and self.detokenizer.stopped
        if stopped or token in self.settings.eos_token_ids:
            self.finish_reason = "stop"
        elif self.settings.stopping_criteria and self._meets_a_criterion():
            self.finish_reason = "stop" if self.error is None else "error"
        elif self.num_new >= self.settings.max_new_tokens:
            self.finish_reason = "length"
        ended = self.finish_reason is not None
        self.finish_reason = before or self.finish_reason
        return ended

    def _meets_a_criterion(self) -> bool:
        """Whether one of the request's own criteria is met, or fails, which is then its error."""
        try:
            return met(self.id, self.settings.stopping_criteria, self.tokens)
        except OwnFailure as failure:
            self.error = str(failure)
            return True


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

    def kept(self, gain: Accepted) -> int:
        """How many of the fed tokens stay: its own, and the drafts that were accepted."""
        return self.count + max(0, min(len(self.drafts), len(gain.tokens) - 1))


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward call computes: which sequence feeds how many tokens."""

    feeds: Seq[Feed]

    @property
    def decode(self) -> bool:
        """Whether every sequence feeds one token, and its drafts."""
        return all(feed.count == 1 for feed in self.feeds)


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to one sequence: the tokens it took, the text it may show."""

    sequence: Sequence
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Usage:
    """Token counts and wall time of one request, in seconds from submission to its last token."""

    prompt_tokens: int
    completion_tokens: int
    seconds: float


@dataclass(frozen=True)
class Completion:
    """The outcome of one request. `token_ids` are the new tokens only, a final EOS included.

    `text` leaves out special tokens, and ends before a stop string; None where the model has no
    tokenizer. `error` says why, when `finish_reason` is "error". `score` is what a search ranked it
    by (transformers' `sequences_scores`); None where nothing was searched.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    report: Report
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    score: float | None = None

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "seconds": round(self.usage.seconds, 6),
            },
            "report": self.report.to_dict(),
        }
        if self.logprobs:
            data["logprobs"] = [
                {"token_id": p.token_id, "logprob": p.logprob, "top": [list(t) for t in p.top]}
                for p in self.logprobs
            ]
        if self.error is not None:
            data["error"] = self.error
        if self.score is not None:
            data["score"] = self.score
        return data


@dataclass(frozen=True)
class Delta:
    """What one step added to a streamed request; the last one carries the completion.

    `text` is empty while characters or a possible stop string are incomplete.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completion.finish_reason if self.completion else None
