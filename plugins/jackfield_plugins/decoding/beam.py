"""``beam``: the likeliest text as a whole, not the likeliest token at each place.

Beam search as transformers does it (`GenerationMixin._beam_search`), whose texts and scores come
out. Of the continuations of all beams the best are looked at; those that end a text become
hypotheses, ranked by the sum of their log-probabilities over length ** length_penalty (Wu et al.
2016, arXiv:1609.08144, with transformers' simpler denominator), and the best others go on.

Where a request samples, the continuations that are looked at are drawn without replacement, by the
probabilities that their scores are logarithms of. The largest sums of a score and a Gumbel number
are such a draw, in its order (Kool et al. 2019, arXiv:1903.06059).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Literal

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
from jackfield.keyed import gumbel

if TYPE_CHECKING:
    import torch

    from jackfield.groups import Group
    from jackfield.settings import Settings


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


class Beam(Decoding):
    """Several texts of a request at once; the best of those that end is what it says."""

    name = "beam"
    options = BeamOptions
    capabilities = DecodingCapabilities(
        settings=(SAMPLER_SETTINGS - {"logprobs"})
        | {"early_stopping", "length_penalty", "num_beams"},
        forks=True,
    )

    def bind(self, context: BindContext) -> Search:
        return BeamSearch(context.options)


class BeamSearch(Search):
    """Remembers nothing: what a request has so far is in its group."""

    def __init__(self, options: BeamOptions) -> None:
        self._options = options

    def width(self, settings: Settings) -> int:
        return settings.beams.num_beams or self._options.num_beams

    def decide(self, groups: Seq[Group], scores: Seq[torch.Tensor]) -> list[Decision]:
        found = _read([_looked_at(group, own) for group, own in zip(groups, scores, strict=True)])
        sizes = [own.shape[1] for own in scores]
        return [
            self._decision(group, list(zip(values, places, strict=True)), vocab_size)
            for group, (values, places), vocab_size in zip(groups, found, sizes, strict=True)
        ]

    def _decision(self, group: Group, ranked: Seq[tuple[float, int]], vocab_size: int) -> Decision:
        """By the `ranked` (score, beam · vocabulary + token): the best first, or as drawn."""
        if any(math.isnan(score) or score == math.inf for score, _ in ranked):
            return Decision(error="no token can be chosen: the logits are not numbers")
        possible = [
            Continuation(*divmod(place, vocab_size), score)
            for score, place in ranked
            if score > -math.inf
        ]
        # What stands lower than there are beams is looked at only to have enough of them.
        ends = cache(lambda c: group.ends(c.parent, c.token))
        ending = filter(ends, possible[: group.width])
        found = [*group.hypotheses, *(self._hypothesis(group, c) for c in ending)]
        best = sorted(found, key=lambda h: -h.score)[: group.width]
        going = (c for c in sorted(possible, key=lambda c: -c.score) if not ends(c))
        beams = list(islice(going, group.width))
        return Decision(() if self._ends(group, best, beams) else beams, best)

    def _hypothesis(self, group: Group, last: Continuation) -> Hypothesis:
        text = group.new_tokens(last.parent, last.token)
        return Hypothesis(text, last.score / len(text) ** self._penalty(group))

    def _ends(self, group: Group, found: Seq[Hypothesis], beams: Seq[Continuation]) -> bool:
        """Whether nothing can, or need, become better than what was `found`."""
        if not beams or len(found) < group.width:
            return not beams
        stopping, penalty = self._early_stopping(group), self._penalty(group)
        # The best beam can score highest at its longest where length is rewarded. Only "never"
        # looks so far ahead; False takes the present length, as transformers does.
        longest = stopping == "never" and penalty > 0
        length = group.settings.max_new_tokens if longest else group.num_new + 1
        return stopping is True or beams[0].score / length**penalty <= found[-1].score

    def _penalty(self, group: Group) -> float:
        asked = group.settings.beams.length_penalty
        return self._options.length_penalty if asked is None else asked

    def _early_stopping(self, group: Group) -> bool | Literal["never"]:
        asked = group.settings.beams.early_stopping
        return self._options.early_stopping if asked is None else asked


def _looked_at(group: Group, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best continuations or some drawn ones, scores and places.

    As many as it takes where each beam may end by each EOS token, and enough must go on.
    """
    flat = scores.flatten()
    count = min(max(2, 1 + len(group.settings.eos_token_ids)) * group.width, len(flat))
    if not group.settings.do_sample:
        return flat.topk(count)
    noise = gumbel(group.settings.seed, len(group.beams[0].tokens), len(flat), flat.device)
    places = (flat + noise).topk(count).indices
    return flat[places], places


def _read(
    found: Seq[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[float], list[int]]]:
    """Pairs of float32 and int64 `[k]`, all in one copy from the device."""
    import torch

    values = torch.cat([values for values, _ in found])
    places = torch.cat([places for _, places in found]).to(torch.int32)
    bits = torch.stack([values.view(torch.int32), places]).cpu()
    sizes = [len(values) for values, _ in found]
    floats = bits[0].view(torch.float32).split(sizes)
    return [
        (own.tolist(), at.tolist()) for own, at in zip(floats, bits[1].split(sizes), strict=True)
    ]


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Beam()]
