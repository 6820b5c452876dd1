"""The sequences of one request that is searched: its beams, and what was found so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeVar

from jackfield.contracts import Accepted, Continuation, Decision, Hypothesis
from jackfield.engine.sequences import Sequence, Tokens
from jackfield.requests.detokenize import Detokenizer
from jackfield.requests.settings import Settings
from jackfield.sampling.fenced import OwnFailure, fenced

T = TypeVar("T")


class Group:
    """One request under a `Search`. The loop changes it between two decisions; nobody else does.

    `members` are as many sequences as there can be beams; those with numbers below `answers` are
    what the request's readers get, once it has ended. `beams` are the members that go on, in the
    order of the last decision, with their `scores`; at first the first one alone, which reads the
    prompt. `hypotheses` are texts that are complete, best first.
    """

    def __init__(self, members: Seq[Sequence], answers: int) -> None:
        self.members = list(members)
        self.answers = self.members[:answers]
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

    def _whole(self, beam: Sequence, token: int) -> bool:
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
    ) -> tuple[list[tuple[Sequence, Sequence]], list[Sequence]]:
        """Go on with `chosen`, in this order; returns what the cache has to copy, and to drop.

        Whatever goes on stays in its member, so that a copy is made only where beams part.
        """
        parents = [self.beams[c.parent] for c in chosen]
        going = {parent.id for parent in parents}
        dropped = [beam for beam in self.beams if beam.id not in going]
        free = iter([member for member in self.members if member.id not in going])
        copies = []
        beams: list[Sequence] = []
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

    def told(self, decision: Decision) -> list[tuple[Sequence, Accepted]]:
        """What the readers get of a search that has ended."""
        error = self.error or decision.error
        found = () if error is not None else decision.hypotheses
        if error is None and not found:
            error = "no token can be chosen: its settings forbid every token"
        short = f"the search found {len(found)} texts, and {len(self.answers)} were asked for"
        gains = [Accepted(h.tokens, ends=self._ended(h)) for h in found[: len(self.answers)]]
        gains += [Accepted(error=error or short)] * (len(self.answers) - len(gains))
        return self._answered(gains, found)

    def _ended(self, found: Hypothesis) -> bool:
        """Whether a text is whole, rather than as long as it may be."""
        if len(found.tokens) < self.settings.max_new_tokens:
            return True
        if self._constraint is None:
            return False
        constraint = self._constraint.copy()
        return bool(self._fenced("structure", lambda: constraint.advance(found.tokens)))

    def so_far(self) -> list[tuple[Sequence, Accepted]]:
        """What the readers get of a search that somebody ends: the best that there is."""
        running = [Hypothesis(tuple(beam.new_tokens), math.nan) for beam in self.beams]
        found = [*self.hypotheses, *running]
        gains = [Accepted(h.tokens) for h in found[: len(self.answers)]]
        gains += [Accepted()] * (len(self.answers) - len(gains))
        return self._answered(gains, self.hypotheses)

    def _answered(
        self, gains: Seq[Accepted], found: Seq[Hypothesis]
    ) -> list[tuple[Sequence, Accepted]]:
        """The members become what readers get, before they grow by `gains`."""
        for number, answer in enumerate(self.answers):
            list.__delitem__(answer.tokens, slice(answer.prompt_length, None))
            answer.detokenizer = self._detokenizer.copy() if self._detokenizer else None
            answer.score = found[number].score if number < len(found) else None
        return list(zip(self.answers, gains, strict=True))


def _stopped(beam: Sequence, token: int) -> bool:
    """Whether a stop string is whole with `token`."""
    if beam.detokenizer is None:
        return False
    detokenizer = beam.detokenizer.copy()
    detokenizer.push([token])
    return detokenizer.stopped


def _become(member: Sequence, source: Sequence) -> None:
    member.tokens = Tokens(source.tokens)
    member.detokenizer = source.detokenizer and source.detokenizer.copy()
    member.constraint = source.constraint and source.constraint.copy()


def _read(beam: Sequence, token: int) -> None:
    if beam.detokenizer is not None:
        beam.detokenizer.push([token])


def _follow(beam: Sequence, token: int) -> None:
    if beam.constraint is not None:
        beam.constraint.advance([token])
