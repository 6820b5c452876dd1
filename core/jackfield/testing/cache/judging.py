"""Keys and values that were read, against those that were written; and what they are instead."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from jackfield.testing.cache.states import States
from jackfield.testing.checks import WrongError


@dataclass(eq=False)
class Text:
    """A text that a cache was given: its number, and one of `States.chain` for each token."""

    request: int
    chain: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Judge:
    """Compares what a query reads with what was written.

    Attributes:
        states: What was written.
        rounding: What is read of a token may be off by this part of its length.
        texts: All that were ever fed, to tell whose a wrong key is.
        rejected: Drafts that were taken back: a number of `States.chain` each.
        worst: How far any was off, as a part of its length.
    """

    states: States
    rounding: float
    texts: dict[int, Text] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)
    worst: float = 0.0
    _along: float = 0.0  # sums of <read, written> and of <written, written>
    _length: float = 0.0

    def look(
        self, found: torch.Tensor, what: int, layer: int, text: Text, positions: Seq[int]
    ) -> None:
        """`found` is `[tokens, heads, head_dim]`: keys (`what` 0) or values (1) of a text.

        Raises WrongError for the first token that is not what was written.
        """
        chain = [text.chain[p] for p in positions]
        due = self.states.several(chain, layer)[what]
        if found.shape != due.shape:
            raise WrongError(
                f"layer {layer} reads {_WHAT[what]} {list(found.shape)} of {len(positions)} "
                f"tokens, and {list(due.shape)} were written"
            )
        if found.dtype != due.dtype or found.device != due.device:
            raise WrongError(
                f"layer {layer} reads {_WHAT[what]} in {found.dtype} on {found.device}, and they "
                f"were written in {due.dtype} on {due.device}"
            )
        if torch.equal(found, due):
            return
        wide_found, wide_due = found.double().flatten(1), due.double().flatten(1)
        off = (wide_found - wide_due).norm(dim=1) / wide_due.norm(dim=1)
        wrong = (~(off <= self.rounding)).nonzero().flatten().tolist()
        if wrong:
            at = wrong[0]
            self._tell(found[at], what, layer, text, positions[at])
        self.worst = max(self.worst, float(off.max()))
        self._along += float((wide_found * wide_due).sum())
        self._length += float((wide_due * wide_due).sum())

    def check_scale(self) -> None:
        """Raise WrongError where all that is read is longer, or shorter, than what was written."""
        scale = self._along / self._length if self._length else 1.0
        if abs(scale - 1) > 0.6 * self.worst + 1e-6:
            raise WrongError(f"what is read is {scale:.3g} times what was written")

    def _tell(self, found: torch.Tensor, what: int, layer: int, text: Text, position: int) -> None:
        who = (
            f"the {_WHAT[what]} that layer {layer} reads for token {position} of request "
            f"{text.request}"
        )
        raise WrongError(f"{who} {self._instead(found, what, layer, text, position)}")

    def _instead(
        self, found: torch.Tensor, what: int, layer: int, text: Text, position: int
    ) -> str:
        """What they are, in words."""
        if not found.isfinite().all():
            return "are NaN or infinite: nothing was stored there, or what the model reused since"
        if not found.any():
            return "are 0: they were never stored"
        own = self.states.of(text.chain[position], layer)[what]
        for words, other in self._others(what, layer, text, position, own):
            if other.shape == found.shape and _close(found, other, self.rounding):
                return f"are {words}"
        scale = float((found.double() * own.double()).sum() / (own.double() ** 2).sum())
        if _close(found, own * scale, 0.01) and scale:
            return f"are {scale:.3g} times what was written"
        off = float((found.double() - own.double()).norm() / own.double().norm())
        off_by = "not what was written"
        return f"are {off_by}: off by {off:.3g} of their length, at most {self.rounding:g} is due"

    def _others(
        self, what: int, layer: int, text: Text, position: int, own: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What they are taken for by mistake: words, and the tensor."""
        states, number = self.states, text.chain[position]
        yield f"its {_WHAT[1 - what]}", states.of(number, layer)[1 - what]
        for shift in range(1, own.shape[0]):
            yield "those of another head: heads are in another order", own.roll(shift, 0)
        yield "those of another head: heads are in another order", own.flip(0)
        yield "negated", -own
        for at, other in enumerate(text.chain):
            if at != position:
                yield f"those of token {at} of it", states.of(other, layer)[what]
        for other_layer in range(len(states.shapes)):
            if other_layer != layer:
                yield f"those of layer {other_layer}", states.of(number, other_layer)[what]
        for draft in self.rejected:
            yield "those of a draft that was rejected", states.of(draft, layer)[what]
        for request, other_text in self.texts.items():
            if request != text.request:
                for at, other in enumerate(other_text.chain):
                    words = f"those of token {at} of request {request}"
                    yield words, states.of(other, layer)[what]


_WHAT = ("keys", "values")


def _close(found: torch.Tensor, other: torch.Tensor, rounding: float) -> bool:
    most = max(rounding, 1e-6) * float(other.double().norm())
    return float((found.double() - other.double()).norm()) <= most
