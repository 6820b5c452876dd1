"""Verification: what each sequence gains by the tokens that were chosen at its rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import isfinite

from jackfield.contracts import Accepted, TokenLogprob
from jackfield.requests.text_errors import FORBIDDEN, NOT_NUMBERS
from jackfield.sampling import logprobs
from jackfield.sampling.processors import Outcome
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER


def gains(rows: RowMap, chosen: Seq[Seq[float]], outcome: Outcome) -> list[Accepted]:
    """The next token of each sequence, and after each draft that was right, another.

    `chosen[r]` is, of row r, the token, the best score, and where any request asks for them the
    log-probabilities (`logprobs.columns`).
    """
    if len(rows) > len(rows.sequences) or outcome.failures or _has_logprobs(rows):
        return [_gain(rows, i, chosen, outcome) for i in range(len(rows.sequences))]
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


def _impossible(best: float) -> str | None:
    """Why no token can be chosen from a row with this best score; None: one can."""
    if isfinite(best):
        return None
    return FORBIDDEN if best == NEVER else NOT_NUMBERS
