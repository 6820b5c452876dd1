"""What a decision of a search may be, rule by rule."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from jackfield.contracts import BeamGroup, Continuation, Decision, Hypothesis
from jackfield.testing.checks import WrongError

if TYPE_CHECKING:
    import torch


def judge(group: BeamGroup, decision: Decision, scores: torch.Tensor, bare: torch.Tensor) -> None:
    """Raise WrongError that names the rule which a decision breaks.

    `scores` are those that it was handed, `bare` the same without the scores of the beams.
    """
    if decision.error is not None:
        if not isinstance(decision.error, str):
            raise WrongError(f"the error of a decision must be a string, not {decision.error!r}")
        if bool((scores > -math.inf).any()):
            raise WrongError(f"decides on an error where tokens are allowed: {decision.error}")
        return
    if len(decision.beams) > group.width:
        raise WrongError(f"goes on with {len(decision.beams)} beams of {group.width}")
    for beam in decision.beams:
        _beam(group, beam, scores)
    places = [(beam.parent, beam.token) for beam in decision.beams]
    groups = group.settings.beams.num_beam_groups or 1
    if groups == 1 and len(set(places)) < len(places):
        twice = next(p for p in places if places.count(p) > 1)
        raise WrongError(f"goes on twice with beam {twice[0]} and token {twice[1]}")
    _texts(group, decision, scores)
    if not decision.beams and not decision.hypotheses and bool((scores > -math.inf).any()):
        raise WrongError("ends a request without a text, where tokens were allowed")
    _arithmetic(group, decision, scores, bare)


def _beam(group: BeamGroup, beam: Any, scores: torch.Tensor) -> None:
    if not isinstance(beam, Continuation):
        raise WrongError(f"a beam must be a Continuation, not {beam!r:.60}")
    if type(beam.parent) is not int or not 0 <= beam.parent < len(group.beams):
        raise WrongError(
            f"a beam has parent {beam.parent!r}, where there are {len(group.beams)} beams"
        )
    _token(beam.token, scores)
    if type(beam.score) is not float or not math.isfinite(beam.score):
        raise WrongError(f"the score of a beam is {beam.score!r}, no finite number")
    if float(scores[beam.parent, beam.token]) == -math.inf:
        raise WrongError(
            f"goes on with token {beam.token} behind beam {beam.parent}, which is forbidden there"
        )
    if beam.token in group.settings.eos_token_ids:
        raise WrongError(f"goes on behind token {beam.token}, an EOS token that ends a text")
    if group.num_new + 1 >= group.settings.max_new_tokens:
        raise WrongError(
            f"goes on where texts have max_new_tokens={group.settings.max_new_tokens} tokens"
        )
    if group.ends(beam.parent, beam.token):
        raise WrongError(f"goes on with a text that ends with token {beam.token} (`ends` says so)")


def _token(token: Any, scores: torch.Tensor) -> None:
    if type(token) is not int or not 0 <= token < scores.shape[1]:
        raise WrongError(f"{token!r:.40} is no token id from 0 to {scores.shape[1] - 1}")


def _texts(group: BeamGroup, decision: Decision, scores: torch.Tensor) -> None:
    one: Any  # what a stranger put there
    known = {h.tokens: h.score for h in group.hypotheses}
    grown = {tuple(beam.new_tokens): at for at, beam in enumerate(group.beams)}
    for one in decision.hypotheses:
        if not isinstance(one, Hypothesis) or not one.tokens:
            raise WrongError(f"a hypothesis must be a Hypothesis with tokens, not {one!r:.60}")
        for token in one.tokens:
            _token(token, scores)
        if type(one.score) is not float or not math.isfinite(one.score):
            raise WrongError(f"the score of a hypothesis is {one.score!r}, no finite number")
        text = tuple(one.tokens)
        if text in known:
            continue
        if (at := grown.get(text[:-1])) is None:
            raise WrongError(f"the hypothesis {list(text)} follows from no beam")
        if float(scores[at, text[-1]]) == -math.inf:
            raise WrongError(f"a hypothesis ends with token {text[-1]}, which is forbidden there")
        if not group.ends(at, text[-1]):
            raise WrongError(f"the hypothesis {list(text)} does not end there (`ends` says no)")
    ranks = [one.score for one in decision.hypotheses]
    if any(a < b for a, b in itertools.pairwise(ranks)):
        raise WrongError("hypotheses must stand best first")
    if (
        len({tuple(h.tokens) for h in decision.hypotheses}) < len(decision.hypotheses)
        and (group.settings.beams.num_beam_groups or 1) == 1
    ):
        raise WrongError("a hypothesis stands there twice")
    if known and (not ranks or ranks[0] < max(known.values())):
        raise WrongError("the best hypothesis of the steps before was dropped")


def _arithmetic(
    group: BeamGroup, decision: Decision, scores: torch.Tensor, bare: torch.Tensor
) -> None:
    """Name the usual mistakes in scores; a search may have scores of its own."""
    if group.num_new == 0 or group.settings.beams.diversity_penalty or len(decision.beams) < 2:
        return
    own = [beam.score for beam in decision.beams]
    places = [(beam.parent, beam.token) for beam in decision.beams]
    count = len(group.beams)
    right = [float(scores[p, t]) for p, t in places]
    mistakes = {
        "leave out the score of the beam": [float(bare[p, t]) for p, t in places],
        "add the score of the beam twice": [
            float(scores[p, t]) + group.scores[p] for p, t in places
        ],
        "are those of another beam": [float(scores[(p + 1) % count, t]) for p, t in places],
        "have the wrong sign": [-one for one in right],
        "are probabilities, not their logarithms": [
            math.exp(float(scores[p, t])) for p, t in places
        ],
    }
    if _close(own, right):
        return
    for what, wrong in mistakes.items():
        if _close(own, wrong):
            raise WrongError(f"the scores of beams {what}")


def _close(some: list[float], others: list[float]) -> bool:
    return all(abs(a - b) < 1e-4 for a, b in zip(some, others, strict=True))
