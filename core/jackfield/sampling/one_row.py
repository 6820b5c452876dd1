"""Drawing from one row of a large vocabulary on a CPU: candidates first, all tokens where need be.

The same tokens as `warpers` and `choosing.draw` give, which sort and normalize whole rows for all
rows at once, as a GPU likes it. A CPU finds the few tokens that can come by a threshold, a
partition or a histogram, each a pass or two over the row, and sorts only what lies around the edge
of top-p. Sums are made in another order here, so where a token is as close to an edge as rounding
could matter, the row is done again in the other way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jackfield.contracts import Settings
from jackfield.sampling.drawing import draw
from jackfield.sampling.warpers import COLDEST, NARROWING, divide

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    #: float32 or float64 `[n]`
    Row = NDArray[Any]
    #: Of scores and the best of them: which stay, in their order; None: it is too close to tell.
    Narrow = Callable[[Row, Any], NDArray[np.intp] | None]

#: As a share of what is compared; float32 softmaxes of 100,000 scores are 30 times as exact.
_IN_DOUBT = 1e-5
_BLOCK = 512  # numbers that are summed before they are looked at one by one
_BITS = 20  # of a float32 that do not tell which bin of the histogram it is in: 8 bins an octave


@dataclass(frozen=True)
class OneRow:
    """How a row draws whose request has these settings; what is inert is None.

    `by_candidates`: nothing narrows but what has a way of its own here.
    """

    temperature: np.float32 | None
    top_k: int | None
    top_p: np.float32 | None
    min_p: np.float32 | None
    settings: Settings
    by_candidates: bool

    @classmethod
    def of(cls, settings: Settings, vocab_size: int) -> OneRow:
        heat, count = max(settings.temperature, COLDEST), settings.top_k or vocab_size
        narrowing = {n for n, (_, inert) in NARROWING.items() if getattr(settings, n) != inert}
        return cls(
            np.float32(heat) if heat != 1 else None,
            count if count < vocab_size else None,
            np.float32(settings.top_p) if settings.top_p != 1 else None,
            np.float32(settings.min_p) if settings.min_p else None,
            settings,
            narrowing <= {"top_k", "top_p", "min_p"},
        )

    def draw(self, scores: Row, best: float, number: float) -> int:
        """A token, for a random `number` from 0 to below 1.

        `scores` `[vocab]` stay as they are; `best` is the best of them. Where that is no finite
        number no token is right, and any is returned.
        """
        if not math.isfinite(best):
            return 0
        with np.errstate(all="ignore"):
            found = self.candidates(scores, best) if self.by_candidates else None
            if found is None:
                return self._without_candidates(scores, number)
            kept, own = found
            at = _inverted(own, number)
        return at if kept is None else int(kept[at])

    def candidates(
        self, scores: Row, best: float
    ) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]] | None:
        """The tokens that can come (None: all) and their scores below the best; None: too close."""
        own, top = scores, scores.dtype.type(best)
        if self.temperature is not None:
            own, top = (scores - top) / self.temperature, scores.dtype.type(0)
        kept: NDArray[np.intp] | None = None
        for narrow in self._narrowing():
            found = narrow(own, top)
            if found is None:
                return None
            kept, own = (found if kept is None else kept[found]), own[found]
        return kept, own.astype(np.float64) - np.float64(top)

    def _narrowing(self) -> list[Narrow]:
        found: list[Narrow] = []
        if self.top_k is not None:
            found.append(partial(_top_k, count=self.top_k))
        if self.top_p is not None:
            found.append(partial(_top_p, share=self.top_p))
        if self.min_p is not None:
            found.append(partial(_min_p, share=self.min_p))
        return found

    def _without_candidates(self, scores: Row, number: float) -> int:
        """The same by the ways of many rows."""
        row = torch.from_numpy(scores)[None]
        if self.temperature is not None:
            row = divide(row, _column(self.temperature))
        return int(draw(self._narrowed(row), torch.tensor([[number]], dtype=torch.float64)))

    def _narrowed(self, row: torch.Tensor) -> torch.Tensor:
        """`row` `[1, vocab]` after what narrows; it may be the same tensor."""
        for name, (act, inert) in NARROWING.items():
            if name == "top_k" and self.top_k is not None:
                row = act(row, torch.tensor([[self.top_k]]), self.top_k)
            elif name != "top_k" and (value := getattr(self.settings, name)) != inert:
                row = act(row, _column(value))
        return row


def _column(value: float | np.float32) -> torch.Tensor:
    return torch.tensor([[float(value)]], dtype=torch.float32)


def _top_k(scores: Row, _: Any, *, count: int) -> NDArray[np.intp]:
    """The `count` best, and what is as good as the last of them."""
    last = np.partition(scores, -count)[-count]
    return np.flatnonzero(scores >= max(last, np.finfo(scores.dtype).min))


def _top_p(scores: Row, best: Any, *, share: np.float32) -> NDArray[np.intp] | None:
    """The fewest, best first, that have the probability `share`; of equal scores, the last ones.

    Those are sought from below: what goes has less than 1 - `share` together.
    """
    weights = np.exp(scores - best)
    total = weights.sum(dtype=np.float64)
    limit = float(np.float32(1) - share) * total
    # All that are so light go together, whatever they are: they weigh less than the limit.
    some = np.flatnonzero(weights > 0.99 * limit / len(weights))
    own = weights[some].astype(np.float64)
    bins = own.astype(np.float32).view(np.int32) >> _BITS
    summed = total - own.sum() + np.bincount(bins, weights=own).cumsum()
    edge = int(np.searchsorted(summed, limit * (1 - _IN_DOUBT), side="right"))
    within = np.flatnonzero(bins == edge)
    within = within[scores[some[within]].argsort(kind="stable")]
    before = summed[edge - 1] if edge else total - own.sum()
    reached = before + own[within].cumsum()
    if not len(within) or (abs(reached - limit) <= _IN_DOUBT * limit).any():
        return None
    stay = np.concatenate([np.flatnonzero(bins > edge), within[reached > limit]])
    found: NDArray[np.intp] = some[np.sort(stay)]
    return found


def _min_p(scores: Row, best: Any, *, share: np.float32) -> NDArray[np.intp] | None:
    """Those with at least `share` of the best one's probability."""
    weights = np.exp(scores - best)
    found = np.flatnonzero(weights >= share * (1 - _IN_DOUBT))
    in_doubt = bool((weights[found] <= share * (1 + _IN_DOUBT)).any())
    return None if in_doubt else found


def _inverted(scores: Row, number: float) -> int:
    """The place at which the cumulative softmax of `scores` (float64) exceeds `number`."""
    weights = np.exp(scores)
    before, start, end = 0.0, 0, len(weights)
    total = weights.sum()
    if end > _BLOCK:
        whole = end - end % _BLOCK
        summed = weights[:whole].reshape(-1, _BLOCK).sum(1).cumsum()
        total = summed[-1] + weights[whole:].sum()
        block = int(np.searchsorted(summed, number * total, side="right"))
        before = summed[block - 1] if block else 0.0
        start, end = block * _BLOCK, min(end, (block + 1) * _BLOCK)
    reached = weights[start:end].cumsum() + before
    at = int(np.searchsorted(reached, number * total, side="right"))
    if at == end - start:  # by rounding: the last one that can come
        at = int(np.flatnonzero(weights[:end])[-1]) - start
    return start + at
