"""``beam``: the likeliest text as a whole, not the likeliest token at each place.

Beam search as transformers does it (`GenerationMixin._beam_search`), whose texts and scores come
out. Of the continuations of all beams the best are looked at; those that end a text become
hypotheses, ranked by the sum of their log-probabilities over length ** length_penalty (Wu et al.
2016, arXiv:1609.08144, with transformers' simpler denominator), and the best others go on.

Where a request samples, the continuations that are looked at are drawn without replacement, by the
probabilities that their scores are logarithms of. The largest sums of a score and a Gumbel number
are such a draw, in its order (Kool et al. 2019, arXiv:1903.06059).

With `num_beam_groups` each group is a search by itself, one after the other in each step, and a
token costs `diversity_penalty` for each beam of the groups before that goes on with it (diverse
beam search with Hamming diversity, Vijayakumar et al. 2016, arXiv:1610.02424). As transformers had
it up to version 4, what was paid stays in the scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

from jackfield import hookimpl
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Continuation,
    Decision,
    Decoding,
    DecodingCapabilities,
    Hypothesis,
    Search,
)
from jackfield.contracts.counter_rng import gumbel
from jackfield.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import BeamGroup, BeamSettings, Sequence, Settings

Scored = TypeVar("Scored", Continuation, Hypothesis)

#: Scores and places (row · vocabulary + token), in an order.
Ranked = Iterable[tuple[float, int]]


@dataclass(frozen=True)
class BeamOptions:
    """What requests get that do not say, under transformers' names for it."""

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: Literal[False, True, "never"] = False

    def __post_init__(self) -> None:
        if self.num_beams < 2:
            raise ValueError(f"num_beams must be at least 2, not {self.num_beams}")
        if not abs(self.length_penalty) <= 100:
            raise ValueError(f"length_penalty must be from -100 to 100, not {self.length_penalty}")


#: Settings that a search of several texts has no use for, or would need more tokens of than stay.
_OF_ONE_TEXT = frozenset(
    {
        "epsilon_cutoff", "eta_cutoff", "guidance_scale", "logprobs", "negative_prompt",
        "output_logits", "output_scores", "stopping_criteria", "top_h", "typical_p",
        "watermarking_config",
    }
)  # fmt: skip


class Beam(Decoding):
    """Several texts of a request at once; the best of those that end is what it says."""

    name = "beam"
    options = BeamOptions
    capabilities = DecodingCapabilities(
        settings=(SAMPLER_SETTINGS - _OF_ONE_TEXT)
        | {"diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups", "num_beams"},
        forks=True,
    )

    def bind(self, context: BindContext) -> Search:
        return BeamSearch(context.options)


@dataclass
class Part:
    """Beams of a request that are a search by themselves: all, or one of its `num_beam_groups`.

    `beams` are their numbers, best first, none once it has ended; `found` is what it has to say.
    """

    width: int
    beams: range
    found: Seq[Hypothesis]


class BeamSearch(Search):
    """What a request has so far is in its group; here is only to which part its beams belong."""

    def __init__(self, options: BeamOptions) -> None:
        self._options = options
        self._known: dict[BeamGroup | None, list[Part]] = {}

    def width(self, settings: Settings) -> int:
        width = settings.beams.num_beams or self._options.num_beams
        _check_groups(settings.beams, width, draws=settings.do_sample)
        return width

    def decide(self, groups: Seq[BeamGroup], scores: Seq[torch.Tensor]) -> list[Decision]:
        parts = [self._parts(group) for group in groups]
        found = _read(
            [
                _looked_at(group, part, own)
                for group, own, every in zip(groups, scores, parts, strict=True)
                for part in every
                if part.beams
            ]
        )
        return [
            self._decision(group, every, found, own.shape[1])
            for group, own, every in zip(groups, scores, parts, strict=True)
        ]

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._known.pop(sequence.group, None)

    def _parts(self, group: BeamGroup) -> list[Part]:
        count = group.settings.beams.num_beam_groups or 1
        if count == 1:
            return [Part(group.width, range(len(group.beams)), group.hypotheses)]
        if group not in self._known:
            self._known[group] = [Part(group.width // count, range(1), ()) for _ in range(count)]
        return self._known[group]

    def _decision(
        self, group: BeamGroup, parts: Seq[Part], found: Iterator[Ranked], vocab_size: int
    ) -> Decision:
        """By what was `found` for each of the `parts` that go on; their beams are changed."""
        beams: list[Continuation] = []
        wrong = False
        for part in parts:
            if not part.beams:
                continue
            ranked = list(next(found))
            wrong |= any(math.isnan(score) or score == math.inf for score, _ in ranked)
            possible = [
                Continuation(part.beams[place // vocab_size], place % vocab_size, score)
                for score, place in ranked
                if score > -math.inf
            ]
            going = self._advance(group, part, _apart(group, part, possible, beams))
            part.beams = range(len(beams), len(beams) + len(going))
            beams += going
        if wrong:
            return Decision(error="no token can be chosen: the logits are not numbers")
        return Decision(beams, _best(h for part in parts for h in part.found))

    def _advance(
        self, group: BeamGroup, part: Part, possible: Seq[Continuation]
    ) -> Seq[Continuation]:
        """What a part goes on with, of what is `possible`: the best first, or as drawn."""
        # What stands lower than there are beams is looked at only to have enough of them.
        ends = cache(lambda c: group.ends(c.parent, c.token))
        ending = filter(ends, possible[: part.width])
        part.found = _best([*part.found, *(self._hypothesis(group, c) for c in ending)])
        part.found = part.found[: part.width]
        going = (c for c in _best(possible) if not ends(c))
        beams = list(islice(going, part.width))
        return () if self._ends(group, part, beams) else beams

    def _hypothesis(self, group: BeamGroup, last: Continuation) -> Hypothesis:
        text = group.new_tokens(last.parent, last.token)
        return Hypothesis(text, last.score / len(text) ** self._penalty(group))

    def _ends(self, group: BeamGroup, part: Part, beams: Seq[Continuation]) -> bool:
        """Whether nothing can, or need, become better than what was found."""
        if not beams or len(part.found) < part.width:
            return not beams
        stopping, penalty = self._early_stopping(group), self._penalty(group)
        # The best beam can score highest at its longest where length is rewarded. Only "never"
        # looks so far ahead; False takes the present length, as transformers does.
        longest = stopping == "never" and penalty > 0
        length = group.settings.max_new_tokens if longest else group.num_new + 1
        return stopping is True or beams[0].score / length**penalty <= part.found[-1].score

    def _penalty(self, group: BeamGroup) -> float:
        asked = group.settings.beams.length_penalty
        return self._options.length_penalty if asked is None else asked

    def _early_stopping(self, group: BeamGroup) -> bool | Literal["never"]:
        asked = group.settings.beams.early_stopping
        return self._options.early_stopping if asked is None else asked


def _best(found: Iterable[Scored]) -> list[Scored]:
    return sorted(found, key=lambda one: -one.score)


def _wanted(group: BeamGroup, part: Part) -> int:
    """As many continuations as it takes where each beam may end by each EOS token."""
    return max(2, 1 + len(group.settings.eos_token_ids)) * part.width


def _looked_at(
    group: BeamGroup, part: Part, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best continuations of a part or some drawn ones, scores and places among its beams.

    Other parts can push down one of each of its beams for each beam that they have.
    """
    own = scores[part.beams.start : part.beams.stop]
    flat = own.flatten()
    pushed = (group.width - part.width) * len(part.beams)
    count = min(_wanted(group, part) + pushed, len(flat))
    if not group.settings.do_sample:
        return flat.topk(count)
    noise = gumbel(group.settings.seed, len(group.beams[0].tokens), len(flat), flat.device)
    places = (flat + noise).topk(count).indices
    return flat[places], places


def _apart(
    group: BeamGroup, part: Part, possible: Seq[Continuation], before: Seq[Continuation]
) -> Seq[Continuation]:
    """`possible`, with what their tokens cost that the parts `before` go on with."""
    if not (penalty := group.settings.beams.diversity_penalty):
        return possible
    times = Counter(c.token for c in before)
    paid = (replace(c, score=c.score - penalty * times[c.token]) for c in possible)
    return _best(paid)[: _wanted(group, part)]


def _read(found: Seq[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Ranked]:
    """Pairs of float32 and int64 `[k]`, all in one copy from the device."""
    import torch

    values = torch.cat([values for values, _ in found])
    places = torch.cat([places for _, places in found]).to(torch.int32)
    bits = torch.stack([values.view(torch.int32), places]).cpu()
    sizes = [len(values) for values, _ in found]
    floats = bits[0].view(torch.float32).split(sizes)
    for own, at in zip(floats, bits[1].split(sizes), strict=True):
        yield zip(own.tolist(), at.tolist(), strict=True)


def _check_groups(asked: BeamSettings, width: int, *, draws: bool) -> None:
    """Raise SettingsError where `width` beams cannot be in the groups that are asked for."""
    groups, penalty = asked.num_beam_groups or 1, asked.diversity_penalty or 0.0
    if groups == 1 and penalty:
        raise SettingsError(
            f"diversity_penalty={penalty:g} keeps groups of beams apart, and num_beam_groups=1; "
            "raise that, or drop it"
        )
    if groups == 1:
        return
    if penalty <= 0:
        raise SettingsError(
            f"num_beam_groups={groups} would find the same texts in each group with "
            f"diversity_penalty={penalty:g}; set that to more than 0, e.g. 0.5"
        )
    if width % groups:
        raise SettingsError(
            f"num_beam_groups={groups} does not divide num_beams={width} into groups of one size; "
            "change one of them"
        )
    if draws:
        raise SettingsError(
            f"num_beam_groups={groups} takes the best continuations, and sampling draws them; "
            "drop it, or set do_sample=False"
        )


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Beam()]
