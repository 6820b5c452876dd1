"""Groups of beams as an engine lends them, over a language of a few tokens that is known."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from jackfield.contracts import Decision, Hypothesis, Search, Settings
from jackfield.testing.checks import WrongError
from jackfield.testing.decoding.judging import judge
from jackfield.testing.lent import Lent, Watch, lend

Text = tuple[int, ...]


@dataclass(frozen=True)
class Language:
    """What may follow each text of `vocab` tokens, drawn by a `seed`.

    A share of `forbidden` tokens is not allowed behind a text; those of `eos` are not before
    `least` tokens.
    """

    vocab: int = 11
    seed: int = 0
    forbidden: float = 0.0
    eos: Text = ()
    least: int = 0

    def scores(self, text: Text) -> torch.Tensor:
        """float32 `[vocab]`: log-probabilities behind the new tokens `text`; -inf: forbidden."""
        key = zlib.crc32(repr((self.seed, text)).encode())
        generator = torch.Generator().manual_seed(key)
        logits = 2 * torch.randn(self.vocab, generator=generator)
        found = logits.log_softmax(-1)
        numbers = random.Random(key)
        for token in range(self.vocab):
            early = token in self.eos and len(text) < self.least
            if early or (token not in self.eos and numbers.random() < self.forbidden):
                found[token] = -torch.inf
        return found


class LentGroup:
    """One request's beams. `stops` says of a text whether a stop string ends it."""

    def __init__(
        self,
        number: int,
        prompt: Seq[int],
        width: int,
        settings: dict[str, Any],
        stops: Callable[[Text], bool] = lambda _: False,
    ) -> None:
        self.members = [lend(100 * number + n, prompt, **settings) for n in range(width)]
        for member in self.members:
            member.group = self
        self.beams: list[Lent] = self.members[:1]
        self.scores = [0.0]
        self.hypotheses: list[Hypothesis] = []
        self._stops = stops

    @property
    def settings(self) -> Settings:
        return self.members[0].settings

    @property
    def width(self) -> int:
        return len(self.members)

    @property
    def num_new(self) -> int:
        return self.beams[0].num_new

    def new_tokens(self, parent: int, token: int) -> Text:
        return (*self.beams[parent].new_tokens, token)

    def ends(self, parent: int, token: int) -> bool:
        text = self.new_tokens(parent, token)
        whole = len(text) >= self.settings.max_new_tokens
        return whole or token in self.settings.eos_token_ids or self._stops(text)

    def state(self) -> tuple[object, ...]:
        """What only the loop may change."""
        return (list(map(id, self.beams)), list(self.scores), list(self.hypotheses), self.width)

    def grow(self, decision: Decision) -> None:
        """Go on as the loop does: a beam stays in its member where it can."""
        texts = [[*self.beams[c.parent].tokens, c.token] for c in decision.beams]
        going, used = [self.beams[c.parent] for c in decision.beams], set[int]()
        free = [m for m in self.members if all(m is not other for other in going)]
        beams: list[Lent] = []
        for parent, text in zip(going, texts, strict=True):
            beam = free.pop(0) if id(parent) in used else parent
            used.add(id(parent))
            list.__setitem__(beam.tokens, slice(None), text)
            beam.num_cached = len(text) - 1
            beams.append(beam)
        self.beams, self.scores = beams, [c.score for c in decision.beams]
        self.hypotheses = list(decision.hypotheses)


def step(search: Search, groups: Seq[LentGroup], language: Language) -> list[Decision]:
    """One call of `decide`, held to its contract; the groups go on by what it decides."""
    bare = [
        torch.stack([language.scores(tuple(beam.new_tokens)) for beam in group.beams])
        for group in groups
    ]
    scores = [own + torch.tensor(g.scores)[:, None] for own, g in zip(bare, groups, strict=True)]
    lent = [own.clone() for own in scores]
    watch = Watch(member for group in groups for member in group.members)
    before = [group.state() for group in groups]
    said = search.decide(tuple(groups), list(lent))
    watch.check("decide")
    if before != [group.state() for group in groups]:
        raise WrongError("decide changed a group, to be read")
    try:
        found = [_plain(decision) for decision in said]
    except TypeError:
        raise WrongError(f"decide must return a list of decisions, not {said!r:.60}") from None
    if len(found) != len(groups):
        raise WrongError(f"decide was asked about {len(groups)} groups and decided {len(found)}")
    for group, decision, own, first in zip(groups, found, scores, bare, strict=True):
        judge(group, decision, own, first)
    for own in lent:
        own.fill_(torch.nan)  # nobody may read them any more
    for group, decision in zip(groups, found, strict=True):
        if decision.beams and decision.error is None:
            group.grow(decision)
        else:
            group.hypotheses = list(decision.hypotheses)
    return found


def _plain(decision: Any) -> Decision:
    if not isinstance(decision, Decision):
        raise WrongError(f"decide must return decisions, not {decision!r:.60}")
    return Decision(list(decision.beams), list(decision.hypotheses), decision.error)


def run(search: Search, groups: Iterable[LentGroup], language: Language) -> None:
    """Decide until all have ended."""
    going = list(groups)
    while going:
        found = step(search, going, language)
        going = [g for g, d in zip(going, found, strict=True) if d.beams and d.error is None]


def texts_of(group: LentGroup) -> list[tuple[Text, float]]:
    """What it found."""
    return [(h.tokens, h.score) for h in group.hypotheses]
