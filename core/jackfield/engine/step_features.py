"""The features of requests: an encoder reads them once, before their request enters."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

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
    """

    what = "features"

    def __init__(
        self, encoder: FeatureEncoder, aside: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._encoder, self._aside = encoder, aside
        self._alone = True

    def begin(self, *, alone: bool) -> None:
        """Sequences are about to enter; `alone`: nobody runs whom this holds up."""
        self._alone = alone

    def read(self, sequence: RunningSequence) -> None:
        """Have the encoder read what a sequence that enters was given, once for all that share it.

        Settles the language in what its text begins with. Raises OwnFailure.
        """
        features = sequence.features
        if features is None or not self._alone:
            return
        fenced("features", sequence.id, partial(self._read, features))
        language = features.given.language
        if sequence.finds_its_language and language is not None:
            for member in sequence.members:
                list.__setitem__(member.tokens, 1, language)

    def _read(self, features: PromptFeatures) -> None:
        given, (start, *_) = features.given, features.beginning.ids
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
