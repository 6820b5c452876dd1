"""A cache of an encoder-decoder model: what the encoder said lives with the request."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield.bridge.encoders import TextEncoder
from jackfield.bridge.joined_rows import crop_encoder
from jackfield.contracts import KVCache, ModelInputs
from jackfield.engine.guarded_cache import GuardedCache
from jackfield.sampling.fenced import fenced

if TYPE_CHECKING:
    import torch

    from jackfield.bridge.feature_encoder import FeatureEncoder
    from jackfield.contracts import Sequence
    from jackfield.engine.sequences import RunningSequence
    from jackfield.engine.steps import RunningStep

_NOBODY: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Said:
    """What an encoder said, `[columns, size]`, of the token ids in `ids`; None: of features."""

    states: torch.Tensor
    ids: Seq[int] | None = None


class EncodedCache(GuardedCache):
    """`inner` of the padded layout, whose steps get what `encoder` said of each row's prompt.

    A text is read once, when its sequence enters; samples and beams of it share that. `aside` is
    entered meanwhile. Features were read before. Rows have as many columns as the longest; keys and
    values that were made of a longer one, which has left, are cropped.
    """

    def __init__(
        self,
        inner: KVCache,
        who: object,
        encoder: TextEncoder | FeatureEncoder,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(inner, who)
        self._encoder, self._aside = encoder, aside
        self._said: dict[int, _Said] = {}  # by the sequence's id
        self._rows = _NOBODY  # whose `_batch` is
        self._batch: dict[str, Any] = {}

    def admit(self, sequence: RunningSequence) -> bool:  # type: ignore[override]
        """Raises OwnFailure where the encoder cannot read its prompt: it is to be released then."""
        if not super().admit(sequence):
            return False
        self._said[sequence.id] = self._of(sequence)
        return True

    def prepare(self, step: RunningStep) -> ModelInputs:  # type: ignore[override]
        inputs = super().prepare(step)
        rows = tuple(item.sequence.id for item in step.scheduled)
        if rows != self._rows:
            states = [self._said[row].states for row in rows]
            longest = max(map(len, states))
            crop_encoder(inputs.kwargs.get("past_key_values"), longest)
            self._batch = self._encoder.joined(states, longest)
            self._rows = rows
        return replace(inputs, kwargs={**inputs.kwargs, **self._batch})

    def _of(self, sequence: RunningSequence) -> _Said:
        """What the encoder says of its prompt. Raises OwnFailure."""
        if (features := sequence.features) is not None:
            assert features.given.said is not None
            return _Said(features.given.said)
        ids = sequence.encoder_ids
        assert ids is not None
        # Samples and beams have the same list.
        found = next((said for said in self._said.values() if said.ids is ids), None)
        return _Said(self._read(sequence.id, ids), ids) if found is None else found

    def _read(self, number: int, ids: Seq[int]) -> torch.Tensor:
        assert isinstance(self._encoder, TextEncoder)
        with self._aside():
            return fenced("encoder", number, partial(self._encoder.read, ids))

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        found = {into.id: self._said[source.id] for source, into in copies}
        self._drop(dropped)
        self._said.update(found)
        super().fork(copies, dropped)

    def preempt(self, sequence: Sequence) -> None:
        self._drop([sequence])
        super().preempt(sequence)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._drop(sequences)
        super().release(sequences)

    def _drop(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._said.pop(sequence.id, None)
        if not self._said:
            self._rows, self._batch = _NOBODY, {}

    def close(self) -> None:
        self._said.clear()
        self._rows, self._batch = _NOBODY, {}
        super().close()

    def held_bytes(self) -> int | None:
        held = super().held_bytes()
        if held is None:
            return None
        states = [said.states for said in self._said.values()]
        own = {id(tensor): tensor.nbytes for tensor in states}  # shared by samples
        batch: int = self._batch["encoder_outputs"][0].nbytes if self._batch else 0
        total: int = held + sum(own.values()) + batch
        return total
