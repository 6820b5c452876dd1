"""The images of requests: read once each, and put into the steps that feed their tokens."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jackfield.bridge.image_encoder import TAKEN, Features, ImageEncoder, joined
from jackfield.bridge.image_steps import Row, blocks_of, fed
from jackfield.sampling.fenced import fenced

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs
    from jackfield.engine.prompt_images import PromptImages
    from jackfield.engine.sequences import RunningSequence
    from jackfield.engine.steps import RunningStep

KEPT_BYTES = 256 * 2**20  # of what the model said of images, for requests to come
#: Seconds of reading images, where nobody runs, before the loop looks at what came meanwhile.
ALONE_SECONDS = 0.2


class KeptFeatures:
    """What the model said of the images that came last, up to so many bytes."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, Features] = OrderedDict()
        self.num_bytes = 0

    def find(self, digest: bytes) -> Features | None:
        found = self._held.get(digest)
        if found is not None:
            self._held.move_to_end(digest)
        return found

    def keep(self, digest: bytes, features: Features) -> None:
        self._held[digest] = features
        self.num_bytes += features.nbytes
        while self.num_bytes > KEPT_BYTES:
            _, gone = self._held.popitem(last=False)
            self.num_bytes -= gone.nbytes

    def clear(self) -> None:
        self._held.clear()
        self.num_bytes = 0


def whole_blocks(running: Seq[RunningSequence], counts: Seq[int], most: int) -> list[int]:
    """See `StepImages.whole`."""
    found, longer = list(counts), None
    for row, (sequence, count) in enumerate(zip(running, counts, strict=True)):
        if count and sequence.images is not None:
            begin, shown = sequence.num_cached, sequence.images.shown
            found[row] = shown.whole(begin, begin + count) - begin
            if not found[row] and longer is None:
                longer = row
                found[row] = shown.behind(begin) - begin
    if longer is None:
        return found
    for least in (1, 0):  # those that decode are the last to wait
        if sum(found) > most:
            found = [n if n <= least or row == longer else 0 for row, n in enumerate(found)]
    return found


class StepImages:
    """What a loop asks of images. `aside` is entered while the model reads one. `windows`: those of
    layers in which an image's tokens see one another, in packed steps.

    Where sequences run, the model reads one image before each step, so that no stream waits for
    all of a chat. One that `forgets` keeps nothing once the last sequence has left: its weights may
    change then.
    """

    what = "images"

    def __init__(
        self,
        encoder: ImageEncoder,
        aside: Callable[[], AbstractContextManager[None]],
        *,
        forgets: bool,
        windows: Set[int | None] = frozenset(),
    ) -> None:
        self._encoder, self._aside, self._forgets = encoder, aside, forgets
        self._windows = windows
        self.kept = KeptFeatures()
        self._ends = 0.0  # when no further image is begun before the next step
        self._begun = False  # whether one was

    def begin(self, *, alone: bool, room: bool) -> None:
        """Sequences are about to enter; `alone`: nobody runs whom this holds up.

        Also where there is no `room` for any.
        """
        del room
        if alone and self._forgets:
            self.kept.clear()
        self._ends = time.perf_counter() + ALONE_SECONDS if alone else 0.0
        self._begun = False

    def read(self, sequence: RunningSequence) -> None:
        """Have the model read the images of a sequence that enters, or the next of them.

        Raises OwnFailure.
        """
        images = sequence.images
        if images is not None and images.unread:
            prompt = sequence.tokens[: sequence.prompt_length]
            fenced("image", sequence.id, partial(self._read, images, prompt))

    def unread(self, sequence: RunningSequence) -> bool:
        """Whether it cannot enter yet."""
        return sequence.images is not None and bool(sequence.images.unread)

    def _read(self, images: PromptImages, prompt: list[int]) -> None:
        found, shown = images.said, images.shown
        with self._aside():
            for image in images.images[len(found) :]:
                features = self.kept.find(image.digest)
                if features is None:
                    if self._begun and time.perf_counter() >= self._ends:
                        return
                    self._begun = True
                    features = self._encoder.read(image.fields)
                    self.kept.keep(image.digest, features)
                found.append(features)
        rows, tokens = sum(map(len, found)), len(shown.places)
        if rows != tokens:
            raise ValueError(f"the model says {rows} rows of images that have {tokens} tokens")
        fields = [image.fields for image in images.images]
        shown.settle(joined(found), self._encoder.positions(prompt, fields))
        images.images, images.said = (), []  # what the processor made of them is large

    def put_into(self, step: RunningStep, inputs: ModelInputs) -> ModelInputs:
        """The inputs of a step, with what the model said of images whose tokens it feeds."""
        if not any(
            images is not None and images.shown.matters(item.start)
            for item in step.scheduled
            for images in (item.sequence.images,)
        ):
            return inputs
        numbers = range(inputs.rows) if inputs.row_of is None else inputs.row_of.tolist()
        rows = [
            Row(item.token_ids, item.start, None if images is None else images.shown, number)
            for number, item in zip(numbers, step.scheduled, strict=True)
            for images in (item.sequence.images,)
        ]
        rows.sort(key=lambda row: row.number)
        found = fed(self._encoder, rows, inputs.kwargs["position_ids"])
        if not found:
            return inputs
        decode = inputs.decode and TAKEN not in found
        inputs = replace(inputs, kwargs={**inputs.kwargs, **found}, decode=decode, fixed=None)
        blocks = blocks_of(rows, inputs.kwargs["input_ids"].device) if self._windows else None
        if blocks is None:
            return inputs
        return replace(inputs, blocks=dict.fromkeys(self._windows, blocks))

    def whole(self, running: Seq[RunningSequence], counts: list[int], most: int) -> list[int]:
        """How many tokens each feeds of those `counts` that it may, so that no image is cut whose
        tokens see one another.

        One step has room for `most` of all, and so for any image. The first one that would begin
        with a part of an image gets all of it. Where there is no room, other prompts wait, and then
        all others; so do those that would begin with a part, too.
        """
        if not self._windows:
            return counts
        return whole_blocks(running, counts, most)

    def may_feed(self, sequence: RunningSequence, most: int) -> int:
        """How many tokens it may feed up to `most`, which is at least those of any image."""
        images = sequence.images
        if not self._windows or images is None:
            return most
        begin = sequence.num_cached
        end = images.shown.whole(begin, begin + most)
        return (images.shown.behind(begin) if end == begin else end) - begin
