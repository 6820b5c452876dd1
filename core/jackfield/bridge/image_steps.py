"""The images of prompts in a step: their features, and where their tokens are along each axis."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jackfield.contracts import Blocks
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.bridge.image_encoder import Features, ImageEncoder


@dataclass(eq=False)
class Shown:
    """The images of a prompt: which of its tokens stand for them, ascending, and what the model
    says of them, once it was asked.

    `positions` is `[axes, tokens]` of the prompt, where a token is not where it stands.
    """

    places: Seq[int]
    features: Features | None = None
    positions: torch.Tensor | None = None
    _ahead: int = 0  # how much farther than they stand the tokens behind the prompt are

    def settle(self, features: Features, positions: torch.Tensor | None) -> None:
        """The model was asked."""
        self.features, self.positions = features, positions
        if positions is not None:
            self._ahead = int(positions.max()) + 1 - positions.shape[1]

    def matters(self, start: int) -> bool:
        """Whether it makes a difference for tokens from `start` on."""
        return self.positions is not None or start <= self.places[-1]

    @cached_property
    def blocks(self) -> Seq[tuple[int, int]]:
        """Tokens of images that stand side by side: the first of them, and the place behind them.

        These are what see one another, where a model's do.
        """
        found: list[tuple[int, int]] = []
        for at in self.places:
            begin = found.pop()[0] if found and found[-1][1] == at else at
            found.append((begin, at + 1))
        return found

    def whole(self, begin: int, end: int) -> int:
        """The farthest place up to `end` that cuts no block; `begin` where the next one is longer.

        `begin` may be within one: of some prompts the beginning is found in a cache.
        """
        at = bisect_left(self.blocks, end, key=itemgetter(0)) - 1
        if at >= 0 and self.blocks[at][1] > end:
            end = self.blocks[at][0]
        return max(begin, end)

    def behind(self, begin: int) -> int:
        """The place behind the block of token `begin`, or behind the token where it has none."""
        at = bisect_right(self.blocks, begin, key=itemgetter(1))
        within = at < len(self.blocks) and self.blocks[at][0] <= begin
        return self.blocks[at][1] if within else begin + 1

    def blocks_in(self, begin: int, end: int) -> Seq[tuple[int, int]]:
        """Those of which a token is from `begin` to before `end`."""
        first = bisect_right(self.blocks, begin, key=itemgetter(1))
        last = bisect_left(self.blocks, end, key=itemgetter(0))
        return self.blocks[first:last]

    def within(self, begin: int, end: int) -> Features | None:
        """The rows of tokens from `begin` to `end`; None: these have no image."""
        first, last = bisect_left(self.places, begin), bisect_left(self.places, end)
        if first == last:
            return None
        assert self.features is not None
        return self.features.part(first, last)

    def positions_of(self, begin: int, end: int) -> torch.Tensor:
        """`[axes, tokens]`; behind the prompt they go on from the farthest along any axis."""
        own = self.positions
        if own is None:
            return torch.arange(begin, end)[None]
        length, ahead = own.shape[1], self._ahead
        after = torch.arange(max(begin, length) + ahead, max(end, length) + ahead)
        return torch.cat([own[:, begin:end], after.expand(len(own), -1)], 1)


class Row(NamedTuple):
    """The tokens that a sequence feeds, the place of the first one in it, and its images.

    `number` is that of its row in the padded layout.
    """

    ids: Seq[int]
    start: int
    shown: Shown | None
    number: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def fed(encoder: ImageEncoder, rows: Seq[Row], position_ids: torch.Tensor) -> dict[str, Any]:
    """Other arguments of a step with these rows, in their order; `position_ids` are those it has.

    Nothing where none has images. A token that stands for images and has none, as a text may have
    it, gets what it always has.
    """
    found = [None if row.shown is None else row.shown.within(row.start, row.end) for row in rows]
    given: dict[str, Any] = {}
    like = next((own for own in found if own is not None), None)
    if like is not None:
        parts: list[Features] = []
        for row, own in zip(rows, found, strict=True):
            alone = row.ids.count(encoder.token) - (0 if own is None else len(own))
            parts += [own] if own is not None else []
            parts += [encoder.of_a_text(like)] * alone  # new ones, behind all of the prompt
        given = encoder.arguments(parts)
        if encoder.token_types is not None:
            given[encoder.token_types] = _are_of_images(rows, position_ids)
    axes = [row.shown.positions for row in rows if row.shown is not None]
    if any(own is not None for own in axes):
        # Tokens that stand for no image are at one place along all axes.
        positions = _positions(rows, position_ids)
        given["position_ids"] = positions[0] if like is None else positions
    return given


def blocks_of(rows: Seq[Row], device: torch.device) -> Blocks | None:
    """The tokens of a packed step that see on to the end of their image; None: none does.

    `rows` in the order of the step's sequences.
    """
    of = [() if row.shown is None else row.shown.blocks_in(row.start, row.end) for row in rows]
    if not any(of):
        return None
    ends: list[int] = []
    for row, blocks in zip(rows, of, strict=True):
        own = list(range(row.start + 1, row.end + 1))
        for begin, end in blocks:
            if end > row.end:
                raise ExecutionError(
                    f"a step cuts the tokens of an image at {row.end}, which see one another up to "
                    f"{end}; select another scheduler or cache"
                )
            first = max(begin, row.start) - row.start
            own[first : end - row.start] = [end] * (end - row.start - first)
        ends += own
    return Blocks(torch.tensor(ends, dtype=torch.int32, device=device), of)


def _are_of_images(rows: Seq[Row], position_ids: torch.Tensor) -> torch.Tensor:
    """1 for tokens of images, which see one another, 0 for others: `[rows, width]`.

    A model makes its mask of these for a step that begins all texts. Raises ExecutionError for
    another one, and where an image is cut.
    """
    found = torch.zeros_like(position_ids, device="cpu")
    width = found.shape[1]
    for row in rows:
        places = () if row.shown is None else row.shown.places
        if row.start or (places and row.end <= places[-1]):
            raise ExecutionError(
                "the tokens of an image see one another here, so prompts are read whole, and a "
                "step cuts one; select another scheduler or cache"
            )
        found[row.number, [width - row.end + at for at in places]] = 1
    return found.to(position_ids.device)


def _positions(rows: Seq[Row], position_ids: torch.Tensor) -> torch.Tensor:
    """Those of a step `[rows, width]` along each axis, `[axes, rows, width]`, on its device.

    Tokens of a row are its last ones; in the packed layout those of all sequences are in one.
    """
    axes = max(len(row.shown.positions_of(0, 0)) for row in rows if row.shown is not None)
    found = torch.zeros(axes, position_ids.numel(), dtype=torch.long)
    width = position_ids.shape[-1]
    packed = len(position_ids) == 1
    end = 0
    for row in rows:
        end = end + len(row.ids) if packed else (row.number + 1) * width
        place = slice(end - len(row.ids), end)
        if row.shown is None:
            found[:, place] = torch.arange(row.start, row.end)
        else:
            found[:, place] = row.shown.positions_of(row.start, row.end)
    return found.view(axes, *position_ids.shape).to(position_ids.device)
