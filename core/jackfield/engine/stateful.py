"""A packed cache of a model whose layers have a state, too: the states go where the pages go."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING

from jackfield.bridge.state_layers import State, StateLayer, StateRows
from jackfield.contracts import ModelInputs, PackedKVCache
from jackfield.engine.guarded_cache import GuardedPackedCache
from jackfield.guarded import all_of

if TYPE_CHECKING:
    from jackfield.contracts import Sequence, Step


class StatefulCache(GuardedPackedCache):
    """`inner`, whose sequences have states in `layers` as long as they are in it.

    A state is that of all tokens of a sequence, so the beginning of a prompt that others have read
    is of no use: each sequence gets a `cache_salt` of its own whenever it enters.
    """

    def __init__(self, inner: PackedKVCache, who: object, layers: Seq[StateLayer]) -> None:
        super().__init__(inner, who)
        self._layers = layers
        self._preempted: dict[int, tuple[int, list[State | None]]] = {}

    def install(self) -> Callable[[], None]:
        """Have the layers look here. Returns what gives them back."""
        return partial(all_of, [layer.install() for layer in self._layers])

    def admit(self, sequence: Sequence) -> bool:
        salt = f"{sequence.id}.{sequence.preemptions}"
        sequence.settings = sequence.settings._replace(cache_salt=salt)
        if not super().admit(sequence):
            return False
        tokens, states = self._preempted.pop(sequence.id, (0, []))
        if sequence.num_cached and sequence.num_cached == tokens:  # its pages were kept, too
            for layer, state in zip(self._layers, states, strict=True):
                if state is not None:
                    layer.put_back(sequence.id, state)
        return True

    def prepare(self, step: Step) -> ModelInputs:
        inputs = super().prepare(step)
        rows, begin = [], 0
        for item in step.scheduled:
            end = begin + item.num_tokens + len(item.drafts)  # where all of these are kept
            rows.append(StateRows(item.sequence.id, begin, end))
            begin = end
        self._reads(rows)
        return inputs

    def _reads(self, rows: list[StateRows] | None) -> None:
        for layer in self._layers:
            layer.rows = rows

    def commit(self, step: Step, kept: Seq[int]) -> None:
        self._reads(None)
        super().commit(step, kept)

    def preempt(self, sequence: Sequence) -> None:
        states = [layer.take_out(sequence.id) for layer in self._layers]
        self._preempted[sequence.id] = sequence.num_cached, states
        self._drop([sequence])
        super().preempt(sequence)

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        self._drop(dropped)
        for layer in self._layers:
            layer.fork([(source.id, into.id) for source, into in copies])
        super().fork(copies, dropped)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._reads(None)
        self._drop(sequences)
        for sequence in sequences:
            self._preempted.pop(sequence.id, None)
        super().release(sequences)

    def _drop(self, sequences: Seq[Sequence]) -> None:
        for layer in self._layers:
            layer.drop([sequence.id for sequence in sequences])

    def close(self) -> None:
        self._preempted.clear()
        for layer in self._layers:
            layer.clear()
        super().close()

    def held_bytes(self) -> int | None:
        pages = super().held_bytes()
        return None if pages is None else pages + sum(layer.num_bytes for layer in self._layers)
