"""Checks of a search: its texts continue its beams, end where they may, and have finite scores."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import Continuation, Decision, Hypothesis, Search, StepBlock, Strategy
from jackfield.engine.checked import CheckedStrategy, unchanged
from jackfield.errors import quoted
from jackfield.guarded import fault, guarded

if TYPE_CHECKING:
    from jackfield.contracts import BeamGroup, Settings


MOST = 100_000  # beams or texts of a decision
ENDLESS = 1 << 24  # tokens of a text

Place = tuple[int, int]  # the number of a beam, and a token behind it


class CheckedSearch(CheckedStrategy, Search):
    """`inner`, called `name` in errors; its groups go on with what they have.

    Unlike it, `decide` is handed scores without those of the beams, which it adds: what it was
    handed nobody changes, and only the places that were chosen are looked up there.
    """

    def __init__(self, inner: Search, name: str, vocab_size: int) -> None:
        super().__init__(inner, name, vocab_size)
        self._search = inner
        self._block: StepBlock | None = None

    def width(self, settings: Settings) -> int:
        with guarded(self, "width"):
            found = self._search.width(settings)
        if type(found) is not int or found < 1:
            raise fault(self, f"width must return a whole number from 1 on; got {quoted(found)}")
        return found

    def decide(self, groups: Seq[BeamGroup], scores: Seq[torch.Tensor]) -> list[Decision]:
        groups = tuple(groups)
        summed = self._added(groups, scores)
        allowed = Allowed(scores)
        before = [_state(group) for group in groups]
        beams = [beam for group in groups for beam in group.beams]
        with guarded(self, "decide"), unchanged(self, "decide", beams):
            said = list(islice(self._search.decide(groups, summed), len(groups) + 1))
            wrong = "" if len(said) == len(groups) else f"{len(said)} decisions"
            found = [_plain(decision) for decision in said]
            if before != [_state(group) for group in groups]:
                raise fault(self, "decide changed a group, to be read")
            places: list[list[Place]] = [[] for _ in groups]
            for group, decision, own in zip(groups, found, places, strict=False):
                wrong = wrong or self._flaw(group, decision, own)
            for at, decision in enumerate(found[: len(groups)]):
                wrong = wrong or _gives_up(decision, allowed, at)
            wrong = wrong or allowed.flaw(places)
        if wrong:
            raise fault(self, f"decide must return one decision a group; got {wrong}")
        return found

    def _added(self, groups: Seq[BeamGroup], scores: Seq[torch.Tensor]) -> list[torch.Tensor]:
        """`scores`, to which those of the beams are added."""
        device = scores[0].device
        if self._block is None or self._block.device != device:
            self._block = StepBlock(device)
        sums = [[score] for group in groups for score in group.scores]
        of_beams = self._block.put(sums, scores[0].dtype)
        self._block.send()
        parts = of_beams.split([len(own) for own in scores])
        return [own + part for own, part in zip(scores, parts, strict=True)]

    def _flaw(self, group: BeamGroup, decision: Any, chosen: list[Place]) -> str:
        """What is wrong with a decision, in words; empty: nothing. Adds what was `chosen`."""
        if not isinstance(decision, Decision):
            return quoted(decision)
        error: Any = decision.error
        if error is not None:
            return "" if isinstance(error, str) else f"the error {quoted(error)}"
        if len(decision.beams) > group.width:
            return f"{len(decision.beams)} beams of a group of {group.width}"
        for beam in decision.beams:
            if flaw := self._flaw_of_beam(group, beam):
                return flaw
        chosen += [(beam.parent, beam.token) for beam in decision.beams]
        if len(set(chosen)) < len(chosen) and not _apart(group):
            return f"a beam twice, of {quoted(decision.beams)}"
        return self._flaw_of_texts(group, decision, chosen)

    def _flaw_of_beam(self, group: BeamGroup, beam: Continuation) -> str:
        parent: Any = beam.parent
        if type(parent) is not int or not 0 <= parent < len(group.beams):
            return f"{quoted(beam)}, where there are {len(group.beams)} beams"
        if not self._is_token(beam.token):
            return f"{quoted(beam)}, where tokens are below {self._vocab_size}"
        if not _is_score(beam.score):
            return f"{quoted(beam)}, whose score is no number"
        most = group.settings.max_new_tokens
        if group.beams[parent].num_new + 1 >= most:
            return f"{quoted(beam)} behind the last of max_new_tokens={most}"
        if beam.token in group.settings.eos_token_ids:
            return f"{quoted(beam)} to go on with, whose token ends a text"
        return ""

    def _flaw_of_texts(self, group: BeamGroup, decision: Any, chosen: list[Place]) -> str:
        """What is wrong with its hypotheses: all it had, or a beam and a token that ends it."""
        known = {h.tokens for h in group.hypotheses}
        grown = {tuple(beam.new_tokens): at for at, beam in enumerate(group.beams)}
        for one in decision.hypotheses:
            if not isinstance(one, Hypothesis) or not one.tokens:
                return f"a hypothesis of {quoted(getattr(one, 'tokens', one))}"
            if not all(map(self._is_token, one.tokens)):
                return f"a hypothesis of {quoted(one.tokens)}"
            if not _is_score(one.score):
                return f"{quoted(one)}, whose score is no number"
            if one.tokens in known:
                continue
            if (at := grown.get(tuple(one.tokens[:-1]))) is None:
                return f"a hypothesis of {quoted(one.tokens)}, which no beam and no text began"
            if not group.ends(at, one.tokens[-1]):
                return f"a hypothesis of {quoted(one.tokens)}, which does not end there"
            chosen.append((at, one.tokens[-1]))
        return _order(group, decision.hypotheses)


def _apart(group: BeamGroup) -> bool:
    """Whether it is several searches side by side, which may come upon the same text."""
    return (group.settings.beams.num_beam_groups or 1) > 1


def _order(group: BeamGroup, found: Seq[Hypothesis]) -> str:
    if len({one.tokens for one in found}) < len(found) and not _apart(group):
        return "a hypothesis twice"
    scores = [one.score for one in found]
    if scores != sorted(scores, reverse=True):
        return f"hypotheses that are not the best first, of scores {quoted(scores)}"
    if group.hypotheses and (not found or found[0].score < group.hypotheses[0].score):
        return "hypotheses without the best that it had"
    return ""


def _is_score(score: object) -> bool:
    return isinstance(score, float | int) and not isinstance(score, bool) and math.isfinite(score)


def _plain(decision: Any) -> Any:
    """The same, of our own classes, which do not change behind our back and have an end."""
    if not isinstance(decision, Decision):
        return decision
    return Decision(
        [_beam(beam) for beam in islice(decision.beams, MOST)],
        [_text(text) for text in islice(decision.hypotheses, MOST)],
        decision.error,
    )


def _beam(one: Any) -> Any:
    return Continuation(one.parent, one.token, one.score) if isinstance(one, Continuation) else one


def _text(one: Any) -> Any:
    if not isinstance(one, Hypothesis):
        return one
    return Hypothesis(tuple(islice(one.tokens, ENDLESS)), one.score)


def _gives_up(decision: Decision, allowed: Allowed, group: int) -> str:
    """Says where it ends a request with no text although there was a token to go on with."""
    if decision.beams or decision.hypotheses or decision.error is not None:
        return ""
    return "neither beams nor texts" if allowed.any(group) else ""


def _state(group: BeamGroup) -> tuple[object, ...]:
    return tuple(group.beams), tuple(group.scores), tuple(group.hypotheses)


class Allowed:
    """Which tokens are allowed behind each beam of some groups, for who wants to know of a few.

    On a GPU one bit for each token is on its way to the host from the beginning, so that it is
    there when the strategy has read its scores, and nobody waits again.
    """

    def __init__(self, scores: Seq[torch.Tensor]) -> None:
        self._scores = scores
        self._bits: torch.Tensor | None = None
        if scores[0].device.type == "cuda":
            self._bits = _packed(torch.cat(list(scores)) > -torch.inf).to("cpu", non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(scores[0].device))

    def flaw(self, places: Seq[Seq[Place]]) -> str:
        """Says which of the places of each group is forbidden; empty: none."""
        every = [place for own in places for place in own]
        if not every:
            return ""
        fine = self._fine(places) if self._bits is None else self._fine_bits(self._bits, places)
        wrong = [token for (_, token), is_fine in zip(every, fine, strict=True) if not is_fine]
        return f"token {wrong[0]}, which is forbidden there" if wrong else ""

    def any(self, group: int) -> bool:
        """Whether anything is allowed behind the beams of this group."""
        if self._bits is None:
            return bool((self._scores[group] > -torch.inf).any())
        self._there.synchronize()
        return bool(self._bits.split([len(own) for own in self._scores])[group].any())

    def _fine(self, places: Seq[Seq[Place]]) -> list[bool]:
        pairs = [place for own in places for place in own]
        at = torch.tensor(pairs, device=self._scores[0].device).T.split(
            [len(own) for own in places], 1
        )
        found = [own[tuple(where)] for own, where in zip(self._scores, at, strict=True)]
        return (torch.cat(found) > -torch.inf).tolist()

    def _fine_bits(self, bits: torch.Tensor, places: Seq[Seq[Place]]) -> list[bool]:
        self._there.synchronize()
        before = accumulate((len(own) for own in self._scores), initial=0)
        at = [
            (first + beam, token)
            for first, own in zip(before, places, strict=False)
            for beam, token in own
        ]
        return [bool(int(bits[row, token // 8]) >> token % 8 & 1) for row, token in at]


def _packed(marks: torch.Tensor) -> torch.Tensor:
    """bool `[rows, vocab]` as uint8 `[rows, ceil(vocab / 8)]`, the first of eight lowest."""
    rows, width = marks.shape
    eights = torch.nn.functional.pad(marks, (0, -width % 8)).view(rows, -1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (eights * weights).sum(-1, dtype=torch.uint8)


def checked(strategy: Strategy, name: str, vocab_size: int) -> CheckedStrategy:
    """`strategy` held to the contract that it has."""
    if isinstance(strategy, Search):
        return CheckedSearch(strategy, name, vocab_size)
    return CheckedStrategy(strategy, name, vocab_size)
