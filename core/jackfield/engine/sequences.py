"""The engine's sequences, groups of beams and pairs: with their text, and how they ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from jackfield.bridge.lora import HeldLora
from jackfield.contracts import (
    Accepted,
    Continuation,
    Decision,
    Hypothesis,
    Sequence,
    Settings,
    TokenLogprob,
    Tokens,
)
from jackfield.engine.completions import FinishReason
from jackfield.engine.prompt_features import PromptFeatures
from jackfield.engine.prompt_images import PromptImages
from jackfield.engine.report import Report
from jackfield.engine.turns import Heard
from jackfield.requests.detokenize import Detokenizer
from jackfield.requests.text_errors import FORBIDDEN, too_few_texts
from jackfield.sampling.constraint import Constraint
from jackfield.sampling.drafted import Drafted
from jackfield.sampling.fenced import OwnFailure, fenced, met

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class RunningSequence(Sequence):
    """A sequence while it runs. The loop and the cache mutate it; nobody else does.

    `constraint` says what may follow its tokens, where the text is to have a structure. `pair` is
    what it is one of, where the request has guidance. `score` is what a search found of it.
    `num_found` tokens were in the cache when it first entered. `passed_over` counts turns of its
    that others got. `report_before` is what had run when the request came. `streams`: somebody
    reads along. `adapter` is computed beside the model's layers. `heard` is what its tokens say,
    where it is an answer in a chat. `encoder_ids` is what an encoder reads, where there is one; the
    prompt is what the decoder begins with then, and behind `features`. `images` are those of its
    prompt. It was asked for at `called` and, when its prompt was read, handed to the loop at
    `started`. Times are in seconds of `time.perf_counter`.
    """

    __slots__ = (
        "adapter", "called", "constraint", "detokenizer", "drafted", "encoder_ids", "error",
        "features", "finish_reason", "first_token_at", "heard", "images", "logits", "logprobs",
        "num_found", "pair", "passed_over", "report_before", "score", "scores", "started",
        "streams",
    )  # fmt: skip

    leader: RunningSequence | None
    group: RunningGroup | None

    def __init__(
        self,
        number: int,
        prompt: Seq[int],
        settings: Settings,
        detokenizer: Detokenizer | None = None,
        *,
        leader: RunningSequence | None = None,
        sample: int = 0,
        streams: bool = False,
        adapter: HeldLora | None = None,
        heard: Heard | None = None,
        encoder_ids: Seq[int] | None = None,
        images: PromptImages | None = None,
        features: PromptFeatures | None = None,
    ) -> None:
        super().__init__(number, prompt, settings, leader=leader, sample=sample)
        self.adapter = adapter
        self.heard = heard
        self.encoder_ids = encoder_ids
        self.images = images
        self.features = features
        self.streams = streams
        self.detokenizer = detokenizer
        self.constraint: Constraint | None = None
        self.pair: GuidedPair | None = None
        self.drafted = Drafted()
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] = []
        self.logits: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.score: float | None = None
        self.num_found: int | None = None
        self.passed_over = 0
        self.called = self.started = time.perf_counter()
        self.first_token_at: float | None = None
        self.report_before: Report | None = None

    @property
    def members(self) -> Seq[RunningSequence]:
        """Itself, or all of the group, or of the pair, that it ends with."""
        return (self,) if self.unit is None else self.unit.members

    @property
    def unit(self) -> RunningGroup | GuidedPair | None:
        """What it enters, decodes and leaves with; None: it is alone."""
        return self.group or self.pair

    @property
    def abreast(self) -> Seq[RunningSequence]:
        """Itself, or all that are in the cache with it: the beams of its group, or its pair."""
        return (self,) if self.unit is None else tuple(self.unit.beams)

    @property
    def answer(self) -> RunningSequence:
        """Itself, or the one whose tokens it gets: that of the pair that has a reader."""
        return self if self.pair is None else self.pair.members[0]

    @property
    def has_read(self) -> bool:
        """Whether its prompt is in the cache, and the negative one of a pair."""
        return all(one.num_cached >= one.prompt_length for one in self.abreast)

    @property
    def num_prompt_tokens(self) -> int:
        """What a caller's prompt has."""
        return self.prompt_length if self.encoder_ids is None else len(self.encoder_ids)

    @property
    def finds_its_language(self) -> bool:
        """Whether a token of its prompt is found when the encoder has read what it was given."""
        return self.features is not None and bool(self.features.beginning.languages)

    @property
    def deadline(self) -> float | None:
        """When the request must have ended; None: whenever."""
        wanted = self.settings.deadline
        return None if wanted is None else self.called + wanted

    @property
    def text_tokens(self) -> list[int]:
        """The new tokens that the text is made of."""
        new = self.new_tokens
        return new[:-1] if new and self._only_ends(new[-1]) else new

    def _only_ends(self, token: int) -> bool:
        """Whether `token` is no text here: an end that could be text is none in a structure."""
        settings = self.settings
        return settings.structure is not None and token in settings.eos_token_ids

    def extend(self, gain: Accepted) -> tuple[list[int], str]:
        """Append what a step accepted, up to the first reason to finish.

        Returns the tokens that were taken and the text that may be shown now.
        """
        taken: list[int] = []
        text = ""
        for token in gain.tokens:
            list.append(self.tokens, token)
            taken.append(token)
            if self.detokenizer is not None and not self._only_ends(token):
                text += self.detokenizer.push([token])
            if self._finishes(token):
                break
        if gain.ends and len(taken) == len(gain.tokens) and self.finish_reason in (None, "length"):
            self.finish_reason = "stop"
        if gain.logprobs:
            self.logprobs.extend(gain.logprobs[: len(taken)])
        if gain.logits or gain.scores:
            self.logits.extend(gain.logits[: len(taken)])
            self.scores.extend(gain.scores[: len(taken)])
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


class RunningGroup:
    """One request under a `Search`. The loop changes it between two decisions; nobody else does.

    `members` are as many sequences as there can be beams; those with numbers below `outputs` are
    what the request's readers get, once it has ended. `beams` are the members that go on, in the
    order of the last decision, with their `scores`; at first the first one alone, which reads the
    prompt. `hypotheses` are texts that are complete, best first.
    """

    def __init__(self, members: Seq[RunningSequence], outputs: int) -> None:
        self.members = list(members)
        self.outputs = self.members[:outputs]
        self.beams = self.members[:1]
        self.scores = [0.0]
        self.hypotheses: Seq[Hypothesis] = ()
        self.error: str | None = None  # why it cannot go on
        self._detokenizer = members[0].detokenizer  # that nothing was pushed into
        self._constraint = members[0].constraint and members[0].constraint.copy()
        for member in self.members:
            member.group = self
            member.detokenizer = self._watching()

    def _watching(self) -> Detokenizer | None:
        """What looks for stop strings in a beam; None where there are none."""
        watched = self._detokenizer is not None and self.settings.stop_strings
        return self._detokenizer.copy() if self._detokenizer is not None and watched else None

    @property
    def settings(self) -> Settings:
        return self.members[0].settings

    @property
    def width(self) -> int:
        """How many beams there can be."""
        return len(self.members)

    @property
    def num_new(self) -> int:
        """How many new tokens every beam has."""
        return self.beams[0].num_new

    def new_tokens(self, parent: int, token: int) -> tuple[int, ...]:
        """The new tokens of beam number `parent`, and `token`."""
        return (*self.beams[parent].new_tokens, token)

    def ends(self, parent: int, token: int) -> bool:
        """Whether the text of beam number `parent` is complete with `token`.

        By an EOS token, by its length, by a stop string, or by what it must look like.
        """
        beam = self.beams[parent]
        if self.error is not None or token in self.settings.eos_token_ids:
            return True
        if beam.num_new + 1 >= self.settings.max_new_tokens:
            return True
        if beam.detokenizer is None and beam.constraint is None:
            return False
        stopped = self._fenced("text", lambda: _stopped(beam, token))
        whole = stopped or self._fenced("structure", lambda: self._whole(beam, token))
        return bool(whole) or self.error is not None

    def _whole(self, beam: RunningSequence, token: int) -> bool:
        """Whether `token` completes what the text must look like."""
        if beam.constraint is None:
            return False
        constraint = beam.constraint.copy()
        whole = constraint.advance([token]) is not None
        self.error = self.error or constraint.error
        return whole

    def _fenced(self, what: str, act: Callable[[], T]) -> T | None:
        """What `act`, the `what` of the request, returns. None: it fails, which ends the search."""
        try:
            return fenced(what, self.members[0].id, act)
        except OwnFailure as failure:
            self.error = str(failure)
            return None

    def grow(
        self, chosen: Seq[Continuation]
    ) -> tuple[list[tuple[RunningSequence, RunningSequence]], list[RunningSequence]]:
        """Go on with `chosen`, in this order; returns what the cache has to copy, and to drop.

        Whatever goes on stays in its member, so that a copy is made only where beams part.
        """
        parents = [self.beams[c.parent] for c in chosen]
        going = {parent.id for parent in parents}
        dropped = [beam for beam in self.beams if beam.id not in going]
        free = iter([member for member in self.members if member.id not in going])
        copies = []
        beams: list[RunningSequence] = []
        for parent in parents:
            if parent in beams:
                beams.append(next(free))
                copies.append((parent, beams[-1]))
                self._fenced("structure", partial(_become, beams[-1], parent))
            else:
                beams.append(parent)
        for beam, continuation in zip(beams, chosen, strict=True):
            list.append(beam.tokens, continuation.token)
            self._fenced("text", partial(_read, beam, continuation.token))
            self._fenced("structure", partial(_follow, beam, continuation.token))
        self.beams, self.scores = beams, [c.score for c in chosen]
        return copies, dropped

    def final_gains(self, decision: Decision) -> list[tuple[RunningSequence, Accepted]]:
        """What the readers get of a search that has ended."""
        error = self.error or decision.error
        found = () if error is not None else decision.hypotheses
        if error is None and not found:
            error = FORBIDDEN
        short = too_few_texts(len(found), len(self.outputs))
        gains = [Accepted(h.tokens, ends=self._ended(h)) for h in found[: len(self.outputs)]]
        gains += [Accepted(error=error or short)] * (len(self.outputs) - len(gains))
        return self._answered(gains, found)

    def _ended(self, found: Hypothesis) -> bool:
        """Whether a text is whole, rather than as long as it may be."""
        if len(found.tokens) < self.settings.max_new_tokens:
            return True
        if self._constraint is None:
            return False
        constraint = self._constraint.copy()
        return bool(self._fenced("structure", lambda: constraint.advance(found.tokens)))

    def so_far(self) -> list[tuple[RunningSequence, Accepted]]:
        """What the readers get of a search that somebody ends: the best that there is."""
        running = [Hypothesis(tuple(beam.new_tokens), math.nan) for beam in self.beams]
        found = [*self.hypotheses, *running]
        gains = [Accepted(h.tokens) for h in found[: len(self.outputs)]]
        gains += [Accepted()] * (len(self.outputs) - len(gains))
        return self._answered(gains, self.hypotheses)

    def _answered(
        self, gains: Seq[Accepted], found: Seq[Hypothesis]
    ) -> list[tuple[RunningSequence, Accepted]]:
        """The members become what readers get, before they grow by `gains`."""
        for number, answer in enumerate(self.outputs):
            list.__delitem__(answer.tokens, slice(answer.prompt_length, None))
            answer.detokenizer = self._detokenizer.copy() if self._detokenizer else None
            answer.score = found[number].score if number < len(found) else None
        return list(zip(self.outputs, gains, strict=True))


class GuidedPair:
    """A request with guidance: the sequence that its reader gets, and one of the negative prompt.

    Tokens are chosen by the logits of both, so both decode in the same steps; the second gets what
    is chosen for the first. They enter the cache, are preempted and leave together.
    """

    def __init__(self, answer: RunningSequence, negative: RunningSequence) -> None:
        self.members = self.beams = (answer, negative)
        answer.pair = negative.pair = self

    def follow(self) -> None:
        """Give the second what the first has gained."""
        answer, negative = self.members
        list.extend(negative.tokens, answer.tokens[answer.prompt_length + negative.num_new :])


def _stopped(beam: RunningSequence, token: int) -> bool:
    """Whether a stop string is whole with `token`."""
    if beam.detokenizer is None:
        return False
    detokenizer = beam.detokenizer.copy()
    detokenizer.push([token])
    return detokenizer.stopped


def _become(member: RunningSequence, source: RunningSequence) -> None:
    member.tokens = Tokens(source.tokens)
    member.detokenizer = source.detokenizer and source.detokenizer.copy()
    member.constraint = source.constraint and source.constraint.copy()


def _read(beam: RunningSequence, token: int) -> None:
    if beam.detokenizer is not None:
        beam.detokenizer.push([token])


def _follow(beam: RunningSequence, token: int) -> None:
    if beam.constraint is not None:
        beam.constraint.advance([token])
