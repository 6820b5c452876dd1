"""Verification: what each sequence gains by the tokens that were chosen at its rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from math import isfinite
from types import MappingProxyType

from jackfield.contracts import Accepted, TokenLogprob
from jackfield.requests.text_errors import FORBIDDEN, NOT_NUMBERS
from jackfield.sampling import logprobs
from jackfield.sampling.processors import Outcome
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER
from jackfield.sampling.told import Shown


def gains(
    rows: RowMap, chosen: Seq[Seq[float]], outcome: Outcome, shown: Shown = MappingProxyType({})
) -> list[Accepted]:
    """The next token of each sequence, and after each draft that was right, another.

    `chosen[r]` is, of row r, the token, the best score, and where any request asks for them the
    log-probabilities (`logprobs.columns`). `shown` are logits and scores of rows that tell them.
    """
    if len(rows) > len(rows.sequences) or outcome.failures or shown or _has_logprobs(rows):
        found = [_gain(rows, i, chosen, outcome) for i in range(len(rows.sequences))]
        return [_told(rows, i, gain, shown) for i, gain in enumerate(found)] if shown else found
    # The same where nobody has drafts, log-probabilities or processors that failed.
    return [
        Accepted((int(token),)) if isfinite(best) else Accepted(error=_impossible(best))
        for token, best in chosen
    ]


def _has_logprobs(rows: RowMap) -> bool:
    return any(s.settings.logprobs is not None for s in rows.sequences)


def _gain(rows: RowMap, i: int, chosen: Seq[Seq[float]], outcome: Outcome) -> Accepted:
    """A failure after a draft is met again where the token before it is the last one, in the next
    step, and counts there.
    """
    drafts, wanted = rows.drafts[i], rows.sequences[i].settings.logprobs
    last = outcome.reached.get(i, len(drafts))
    tokens: list[int] = []
    found: list[TokenLogprob] = []
    for row in rows.of(i):
        depth = rows.depths[row]
        error = outcome.failures.get(row) or _impossible(chosen[row][1])
        if error is not None:
            return Accepted(tuple(tokens), tuple(found), None if depth else error)
        tokens.append(int(chosen[row][0]))
        if wanted is not None:
            found.append(logprobs.entry(tokens[-1], chosen[row][2:], wanted))
        if depth >= last or drafts[depth] != tokens[-1]:
            break
    return Accepted(tuple(tokens), tuple(found))


def _told(rows: RowMap, i: int, gain: Accepted, shown: Shown) -> Accepted:
    """The same with the logits and scores of its tokens, as far as the request asks for them."""
    settings, own = rows.sequences[i].settings, rows.of(i)[: len(gain.tokens)]
    return replace(
        gain,
        logits=[shown[row][0] for row in own] if settings.output_logits else (),
        scores=[shown[row][1] for row in own] if settings.output_scores else (),
    )


def _impossible(best: float) -> str | None:
    """Why no token can be chosen from a row with this best score; None: one can."""
    if isfinite(best):
        return None
    return FORBIDDEN if best == NEVER else NOT_NUMBERS
