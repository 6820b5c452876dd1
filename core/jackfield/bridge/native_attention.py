"""Attention as native calls: what a compiled step runs where it would call a function.

Each layer of a step is asked for its calls. In a step like the last only the step's tables differ:
where cache and attention say that their calls read the new ones, no layer is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

from jackfield.bridge.native_calls import flaw_of
from jackfield.contracts.native import ROOM
from jackfield.guarded import fault, guarded

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import BoundAttention, PackedKVCache, PackedLayer
    from jackfield.contracts.native import NativeCall
    from jackfield.registry.backends import Registered


class _Asked(NamedTuple):
    """One layer, as it was asked for last: the step's tensors, and rows of them."""

    width: int
    query: torch.Tensor
    output: torch.Tensor
    rows: tuple[torch.Tensor, ...]


class _Given(NamedTuple):
    """What one layer's calls are for: into `output`, of these pages; pools are not kept alive."""

    output: torch.Tensor
    layer: PackedLayer
    keys: weakref.ref[torch.Tensor]
    values: weakref.ref[torch.Tensor]


class NativeAttention:
    """The calls of `bound` over `pages`. `tapped` says whether somebody looks on at the calls."""

    def __init__(
        self,
        registered: Registered,
        bound: BoundAttention,
        pages: PackedKVCache,
        understood: frozenset[str],
        tapped: Callable[[], bool],
        sources: Mapping[int, int],
    ) -> None:
        assert bound.native is not None
        self._attend, self._attend_again = bound.native, bound.native_again
        self._registered, self._pages = registered, pages
        self._understood, self._tapped = understood, tapped
        self._sources = sources  # layers that read what another one keeps
        self._guard = guarded(pages, "native_write")
        self._asked: dict[int, _Asked] = {}
        self._given: dict[int, _Given] = {}  # of layers that had calls when they were asked last
        self._width = 0
        self.lengths: tuple[int, ...] = ()  # of queries, of the last step that ran natively

    def calls(
        self,
        number: int,
        width: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Seq[NativeCall] | None:
        """What does in this step what layer `number` does; None: Python does.

        `[1, heads, tokens, head_dim]`, of whose tokens the first `width` are the step's own.
        """
        self._given.pop(number, None)
        if self._tapped() or not kwargs.keys() <= self._understood:
            return None
        last = self._asked.get(number)
        if (
            last is None
            or last.query is not query
            or last.output is not output
            or last.width != width
        ):
            rows = [states[0, :, :width].transpose(0, 1) for states in (query, key, value)]
            last = _Asked(width, query, output, (*rows, output[0, :width]))
            self._asked[number] = last
        queries, keys, values, outputs = last.rows
        guard = self._guard
        guard.layer, guard.who, guard.what = number, self._pages, "native_write"
        with guard:
            written = self._written(number, keys, values)
            if written is None:
                return None
            layer, *stored = written
            guard.who, guard.what = self._registered, "native"
            call = self._attend(queries, layer, outputs, **kwargs)
        if call is None:
            return None
        if flaw := flaw_of(call, ROOM):
            raise fault(self._registered, f"native (layer {number}) {flaw}")
        self.lengths, self._width = layer.step.query_lengths, width
        pools = weakref.ref(layer.keys), weakref.ref(layer.values)
        self._given[number] = _Given(output, layer, *pools)
        return *stored, call

    def _written(
        self, number: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer] | tuple[PackedLayer, NativeCall] | None:
        """The pages of a layer, and what writes to them, where no other layer's calls do."""
        if number not in self._sources:
            return self._pages.native_write(number, keys, values)
        source = self._given.get(self._sources[number])
        return None if source is None else (source.layer,)

    def again(self, width: int, outputs: Mapping[int, torch.Tensor]) -> bool:
        """Whether the calls that were given last, for `outputs`, do in this step what they are for.

        `outputs` are those of all layers.
        """
        given, again = self._given, self._attend_again
        if again is None or self._tapped() or width != self._width or len(given) != len(outputs):
            return False
        tables = {}
        for number, output in outputs.items():
            found = given.get(number)
            if found is None or found.output is not output:
                return False
            layer = found.layer
            if layer.keys is not found.keys() or layer.values is not found.values():
                return False
            tables[id(layer.tables)] = layer.tables
        guard = self._guard
        guard.layer, guard.who, guard.what = None, self._pages, "native_again"
        with guard:
            if not self._pages.native_again(width):
                return False
            guard.who = self._registered
            for one in tables.values():
                if not again(one):
                    return False
                self.lengths = one.step.query_lengths
        return True
