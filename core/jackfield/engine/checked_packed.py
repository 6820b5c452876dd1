"""Checks of a packed cache of another package, and of the pages that attentions read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from jackfield.bridge.native_calls import flaw_of
from jackfield.contracts import FixedStep, KVCache, ModelInputs, PackedKVCache, PackedLayer
from jackfield.contracts.native import ROOM
from jackfield.engine.checked_cache import CheckedCache
from jackfield.engine.checked_contents import Contents
from jackfield.engine.checked_inputs import (
    flaw_of_first,
    flaw_of_fixed,
    flaw_of_step,
    flaw_of_tables,
)
from jackfield.engine.checked_pages import Owners, Prefixes, Spots
from jackfield.engine.guarded_cache import GuardedCache, GuardedPackedCache
from jackfield.errors import quoted
from jackfield.guarded import fault
from jackfield.registry.backends import Registered

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import Sequence, Step
    from jackfield.contracts.native import NativeCall


class CheckedPackedCache(CheckedCache, GuardedPackedCache):
    """The same for a cache of the packed layout, and for the pages that it hands to attentions."""

    _packed = True

    def __init__(self, inner: PackedKVCache, who: object, windows: Seq[int | None] = ()) -> None:
        super().__init__(inner, who)
        self._windows = windows
        rounding: Any = inner.rounding
        if type(rounding) not in (int, float) or not 0 <= rounding < 1:
            raise fault(
                self, f"rounding must be a number from 0 to below 1, got {quoted(rounding)}"
            )
        self._prefixes, self._contents = Prefixes(), Contents(rounding)
        self._owners: dict[int | None, Owners] = {}
        self._step: Step | None = None
        self._fixed: FixedStep | None = None  # where the step lies
        self._places: dict[int, list[int]] = {}  # rows -> the addresses of what lies there
        self._read: dict[int, tuple[int, int]] = {}  # the pools of a layer, as steps there read it
        self._seen: dict[int, Any] = {}  # tables that were looked at in this step
        self._pools: dict[int, weakref.ref[torch.Tensor]] = {}  # of a layer, found to fit

    def prepare(self, step: Step) -> ModelInputs:
        found = super().prepare(step)
        self._step, self._fixed = step, found.fixed
        self._seen.clear()
        if found.fixed is not None:
            self._look_at_fixed(found, step)
        if self._spot:
            self._contents.begin(step)
        return found

    def fix(self, rows: int) -> FixedStep:
        self._step, self._fixed = None, super().fix(rows)
        self._seen.clear()
        self._places[rows] = _addresses(self._fixed)
        return self._fixed

    def loosen(self, rows: int) -> None:
        super().loosen(rows)
        self._places.pop(rows, None)
        if not self._places:
            self._read.clear()

    def admit(self, sequence: Sequence) -> bool:
        found = super().admit(sequence)
        if found and not self._prefixes.admit(sequence):
            raise fault(
                self,
                f"admit says that it has the first {sequence.num_cached} tokens of request "
                f"{sequence.id}, which it was never given",
            )
        return found

    def commit(self, step: Step, kept: Seq[int]) -> None:
        if flaw := self._contents.judged():
            raise fault(self, f"write: {flaw}")
        super().commit(step, kept)
        self._contents.end()

    def _leaves(self, sequence: Sequence, *, known: bool = True) -> None:
        """A sequence goes; its tokens are `known` to be those that it was given."""
        if known:
            self._prefixes.leave(sequence)
        else:
            self._prefixes.forgotten = True
        self._contents.leave(sequence.id, kept=known)
        for owners in self._owners.values():
            owners.left(sequence.id)

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._leaves(sequence)
        super().release(sequences)

    def preempt(self, sequence: Sequence) -> None:
        self._leaves(sequence)
        super().preempt(sequence)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        self._leaves(sequence, known=False)
        super().truncate(sequence, tokens)

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        for sequence in (*dropped, *(into for _, into in copies)):
            self._leaves(sequence, known=False)
        super().fork(copies, dropped)

    def forget(self) -> None:
        super().forget()
        self._prefixes.clear()
        self._contents.clear()
        self._spots = Spots()  # the first steps after it are looked at

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        found = self._pages.write(layer, keys, values)
        self._hold(layer, found, keys)
        if self._spot and (flaw := self._contents.look(layer, found, keys, values)):
            raise fault(self, f"write: {flaw}")
        return found

    def native_write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer, NativeCall] | None:
        """Not in steps whose keys and values are read back."""
        written: Any = None if self._spot else self._pages.native_write(layer, keys, values)
        if written is None:
            return None
        if not isinstance(written, tuple) or len(written) != 2:
            raise fault(self, f"native_write must return a pair or None, got {quoted(written)}")
        self._hold(layer, written[0], keys)
        if flaw := flaw_of(written[1], ROOM):
            raise fault(self, f"native_write (layer {layer}) {flaw}")
        return written

    def native_again(self, tokens: int) -> bool:
        """Never: what each layer returns is looked at in each step."""
        del tokens
        return False

    def _hold(self, layer: int, found: PackedLayer, keys: torch.Tensor) -> None:
        """Hold what `write` returned to the step."""
        if not isinstance(found, PackedLayer):
            raise fault(self, f"write must return a PackedLayer, got {quoted(found)}")
        tables = found.tables
        if id(tables) not in self._seen:
            if any(other.window == tables.window for other in self._seen.values()):
                what = "the tables of another layer with the same window"
                raise fault(self, f"write must return {what} in layer {layer}, not others")
            self._seen[id(tables)] = tables
            if self._fixed is None:
                self._look(tables, found.keys, keys)
            elif not any(tables is fixed for fixed in self._fixed.tables):
                raise fault(self, "write has other tables than the fixed step")
        pool = self._pools.get(layer)
        if pool is None or pool() is not found.keys:
            self._fit(found, keys)
            self._pools[layer] = weakref.ref(found.keys)
        if self._places:
            self._stay(layer, found)
        if self._windows and tables.window != self._windows[layer]:
            due = self._windows[layer]
            raise fault(self, f"write has window {tables.window} in layer {layer}, {due} due")

    def _fit(self, found: PackedLayer, keys: torch.Tensor) -> None:
        """The pages of a layer, which stay the same for many steps, hold tokens like `keys`."""
        size = found.keys.shape
        if size != found.values.shape[:3] + size[3:] or size[2:] != keys.shape[1:]:
            raise fault(
                self,
                f"write must return pages of {list(keys.shape[1:])} a token, got keys "
                f"{list(size)} and values {list(found.values.shape)}",
            )

    def _stay(self, layer: int, found: PackedLayer) -> None:
        """What steps at fixed places read is where it was when they were recorded."""
        pools = (found.keys.data_ptr(), found.values.data_ptr())
        if self._fixed is not None:
            pools = self._read.setdefault(layer, pools)
        if self._read.get(layer, pools) != (found.keys.data_ptr(), found.values.data_ptr()):
            raise fault(
                self, f"write has moved the pages of layer {layer}, which recorded steps read"
            )

    def _look_at_fixed(self, found: ModelInputs, step: Step) -> None:
        """The same of a step at a fixed place, where no `write` is called when it is played."""
        assert found.fixed is not None
        if _addresses(found.fixed) != self._places.get(found.fixed.rows):
            raise fault(self, f"prepare has moved what `fix({found.fixed.rows})` laid out")
        for name in ("input_ids", "position_ids"):
            here, there = found.kwargs[name], getattr(found.fixed, name)
            if here.data_ptr() != there.data_ptr() or here.shape[1] > found.fixed.rows:
                raise fault(self, f"prepare must return {name} in the fixed step that it names")
        for tables in found.fixed.tables:
            pools = (
                pool() for layer, pool in self._pools.items()
                if not self._windows or self._windows[layer] == tables.window
            )  # fmt: skip
            number = min((len(pool) for pool in pools if pool is not None), default=0)
            flaw = flaw_of_fixed(tables, step.scheduled, number, read=self._spot)
            if not flaw:
                owners = self._owners.setdefault(tables.window, Owners())
                flaw = owners.look(tables, step.scheduled, number, whole=self._spot)
            if flaw:
                raise fault(self, f"prepare has {flaw}")

    def _look(self, tables: Any, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Each sequence's part of the step, and its pages, are what they must be."""
        assert self._step is not None
        at, number, size = 0, pages.shape[0], tables.page_size
        for row, item in enumerate(self._step.scheduled):
            length = item.num_tokens + len(item.drafts)
            start, end = at, item.start + length
            span = tables.step.spans[row]
            if tuple(span) != (start, length, end):
                raise fault(
                    self,
                    f"write has span {tuple(span)} for scheduled[{row}], "
                    f"{(start, length, end)} due",
                )
            at += length
            own = tables.tables[row]
            if not own or not 0 <= own[0] < number or not 0 <= own[-1] < number:
                raise fault(self, f"write has page {quoted(own)} for scheduled[{row}], of {number}")
            if tables.firsts[row] + len(own) * size < end:
                raise fault(self, f"write has {len(own)} pages of {size} for {end} tokens")
            if flaw := flaw_of_first(tables, row):
                raise fault(self, f"write has {flaw} for scheduled[{row}]")
        if len(tables.step.spans) != len(self._step.scheduled) or at != len(keys):
            raise fault(self, f"write has {len(tables.step.spans)} spans for {row + 1} sequences")
        read = self._spot or keys.device.type == "cpu"
        flaw = flaw_of_step(tables.step, read=read)
        flaw = flaw or flaw_of_tables(tables, read=self._spot)
        if not flaw:
            owners = self._owners.setdefault(tables.window, Owners())
            flaw = owners.look(tables, self._step.scheduled, number, whole=self._spot)
        if flaw:
            raise fault(self, f"write has {flaw}")


def _addresses(fixed: FixedStep) -> list[int]:
    tensors = [fixed.input_ids, fixed.position_ids]
    for tables in fixed.tables:
        tensors += [tables.block_table, tables.first]
        tensors += [tables.step.seq_lens, tables.step.cu_seqlens_q]
    return [tensor.data_ptr() for tensor in tensors]


def held_to_contract(
    cache: KVCache,
    who: Registered,
    windows: Seq[int | None] = (),
    users: Seq[Registered] = (),
) -> KVCache:
    """`cache` of `who` held to its contract, for layers with these `windows` (none: any).

    `users` are the backends that are handed its pages. Where all are jackfield's own, they are held
    to it by tests, and cost a step nothing but their names.
    """
    strangers = [user for user in users if not user.own]
    own = who.own and not strangers
    blamed: object = who
    if who.own and strangers:
        blamed = f"{who}, as {' and '.join(map(str, strangers))} left it"
    if isinstance(cache, PackedKVCache):
        return GuardedPackedCache(cache, who) if own else CheckedPackedCache(cache, blamed, windows)
    return GuardedCache(cache, who) if own else CheckedCache(cache, blamed)
