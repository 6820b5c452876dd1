"""The features of requests: an encoder reads them once, before their request enters."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from jackfield.engine.batch_limits import UNLIMITED
from jackfield.sampling.fenced import fenced

if TYPE_CHECKING:
    from jackfield.bridge.feature_encoder import FeatureEncoder
    from jackfield.contracts import ModelInputs
    from jackfield.engine.prompt_features import PromptFeatures
    from jackfield.engine.sequences import RunningSequence
    from jackfield.engine.steps import RunningStep


class StepFeatures:
    """What a loop asks of features, as of images. `aside` is entered while the encoder reads.

    Those of requests that are about to run together are read one after another, where nobody runs.
    Where somebody does, those of one are read before each step, if there is a place for it.
    """

    what = "features"

    def __init__(
        self, encoder: FeatureEncoder, aside: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._encoder, self._aside = encoder, aside
        self._left = UNLIMITED  # how many prompts may still be read before the next step

    def begin(self, *, alone: bool, room: bool) -> None:
        """Sequences are about to enter, if there is `room`; `alone`: nobody runs whom this holds
        up.
        """
        self._left = UNLIMITED if alone else int(room)

    def read(self, sequence: RunningSequence) -> None:
        """Have the encoder read what a sequence that enters was given, once for all that share it.

        Settles the language in what its text begins with. Raises OwnFailure.
        """
        features = sequence.features
        if features is None or (self.unread(sequence) and not self._left):
            return
        fenced("features", sequence.id, partial(self._read, features))
        language = features.given.language
        if sequence.finds_its_language and language is not None:
            for member in sequence.members:
                list.__setitem__(member.tokens, 1, language)

    def unread(self, sequence: RunningSequence) -> bool:
        """Whether it cannot enter yet."""
        features = sequence.features
        if features is None:
            return False
        finds = bool(features.beginning.languages) and features.given.language is None
        return features.given.said is None or finds

    def _read(self, features: PromptFeatures) -> None:
        given, (start, *_) = features.given, features.beginning.ids
        self._left -= given.said is None
        with self._aside():
            if given.said is None:
                assert given.values is not None
                given.said = self._encoder.read(given.values, given.mask)
                given.values = given.mask = None  # are large
            if features.beginning.languages and given.language is None:
                among = features.beginning.languages
                given.language = self._encoder.language(given.said, start, among)

    def put_into(self, step: RunningStep, inputs: ModelInputs) -> ModelInputs:
        """The inputs of a step: its cache has what the encoder said."""
        del step
        return inputs

    def whole(self, running: Seq[RunningSequence], counts: list[int], most: int) -> list[int]:
        """How many tokens each feeds of those `counts`: all, since none stands for features."""
        del running, most
        return counts

    def may_feed(self, sequence: RunningSequence, most: int) -> int:
        """How many tokens it may feed up to `most`: so many."""
        del sequence
        return most
