"""Beam search text by text, in plain Python: what `num_beams` and its neighbours ask for.

As transformers has it (`GenerationMixin._beam_search`): of the continuations of all beams the best
max(2, 1 + EOS tokens) · beams are looked at; those among the first `beams` that end become texts,
ranked by score / length ** length_penalty, and the best others go on. With groups: Vijayakumar et
al. 2016, arXiv:1610.02424, algorithm 1 with Hamming diversity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Text = tuple[int, ...]
Scored = tuple[float, Text]


@dataclass(frozen=True)
class Asked:
    """What a request says; `scores` are the log-probabilities behind a text."""

    scores: Callable[[Text], list[float]]
    ends: Callable[[Text], bool]
    max_new_tokens: int
    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    num_eos: int = 0


@dataclass
class _Part:
    going: list[Scored] = field(default_factory=lambda: [(0.0, ())])
    found: list[Scored] = field(default_factory=list)


def search(asked: Asked) -> list[tuple[Text, float]]:
    """The texts that are found, best first, with their scores."""
    parts = [_Part() for _ in range(asked.num_beam_groups)]
    for length in range(1, asked.max_new_tokens + 1):
        taken: list[int] = []
        for part in parts:
            if part.going:
                _advance(asked, part, length, taken)
                taken += [text[-1] for _, text in part.going]
    every = sorted((one for part in parts for one in part.found), key=lambda one: -one[0])
    return [(text, score) for score, text in every]


def _advance(asked: Asked, part: _Part, length: int, taken: list[int]) -> None:
    width = asked.num_beams // asked.num_beam_groups
    possible = [
        (score + own - asked.diversity_penalty * taken.count(token), (*text, token))
        for score, text in part.going
        for token, own in enumerate(asked.scores(text))
        if own > -math.inf
    ]
    possible.sort(key=lambda one: -one[0])
    looked_at = possible[: max(2, 1 + asked.num_eos) * width]
    ended = [
        (score / length**asked.length_penalty, text)
        for score, text in looked_at[:width]
        if asked.ends(text)
    ]
    part.found = sorted([*part.found, *ended], key=lambda one: -one[0])[:width]
    part.going = [one for one in looked_at if not asked.ends(one[1])][:width]
    if not part.going or len(part.found) < width:
        return
    ahead = asked.early_stopping == "never" and asked.length_penalty > 0
    best = part.going[0][0] / (asked.max_new_tokens if ahead else length) ** asked.length_penalty
    if asked.early_stopping is True or best <= part.found[-1][0]:
        part.going = []
