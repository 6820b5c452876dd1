"""A packed cache of a model whose layers have a state, too: the states go where the pages go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING

from jackfield.bridge.state_layers import StateLayer, StateRows
from jackfield.contracts import ModelInputs, PackedKVCache
from jackfield.engine.guarded_cache import GuardedPackedCache
from jackfield.guarded import all_of, fault

if TYPE_CHECKING:
    from jackfield.contracts import Sequence, Step


class StatefulCache(GuardedPackedCache):
    """`inner`, whose sequences have states in `layers` as long as they are in it.

    A state is that of all tokens of a sequence, so what was read before it entered is of no use,
    by others or by itself: it gets another `cache_salt` whenever it enters.
    """

    def __init__(self, inner: PackedKVCache, who: object, layers: Seq[StateLayer]) -> None:
        super().__init__(inner, who)
        self.overlaps = False  # states of the step before are set when its rows are known
        self._layers = layers
        self._rows: list[StateRows] = []

    def install(self) -> Callable[[], None]:
        """Have the layers look here. Returns what gives them back."""
        return partial(all_of, [layer.install() for layer in self._layers])

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The step that was prepared is computed meanwhile, in this thread.

        Raises ExecutionError where a layer was not asked for what it keeps.
        """
        for layer in self._layers:
            layer.begin(self._rows)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.end()
        for layer in self._layers:
            layer.check_called()

    def admit(self, sequence: Sequence) -> bool:
        salt = f"{sequence.id}.{sequence.preemptions}"
        sequence.settings = sequence.settings._replace(cache_salt=salt)
        if not super().admit(sequence):
            return False
        if sequence.num_cached:
            raise fault(
                self._who,
                f"admit says that it has {sequence.num_cached} tokens of a sequence whose "
                "cache_salt no other had, and whose states are gone; it must say 0",
            )
        return True

    def prepare(self, step: Step) -> ModelInputs:
        inputs = super().prepare(step)
        self._rows, begin = [], 0
        for item in step.scheduled:
            end = begin + item.num_tokens + len(item.drafts)  # where all of these are kept
            self._rows.append(StateRows(item.sequence.id, begin, end))
            begin = end
        return inputs

    def preempt(self, sequence: Sequence) -> None:
        self._drop([sequence])
        super().preempt(sequence)

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        self._drop(dropped)
        for layer in self._layers:
            layer.fork([(source.id, into.id) for source, into in copies])
        super().fork(copies, dropped)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._drop(sequences)
        super().release(sequences)

    def _drop(self, sequences: Seq[Sequence]) -> None:
        for layer in self._layers:
            layer.drop([sequence.id for sequence in sequences])

    def close(self) -> None:
        for layer in self._layers:
            layer.clear()
        super().close()

    def held_bytes(self) -> int | None:
        pages = super().held_bytes()
        return None if pages is None else pages + sum(layer.num_bytes for layer in self._layers)
