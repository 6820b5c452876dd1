"""Several adapters in one engine: held by name, chosen by each request, computed in one batch."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.adapter import Adapter, AdapterUse
from jackfield.bridge.lora import NO_SLOT, FoundLora, HeldLora, read_lora
from jackfield.bridge.lora_layers import Chosen, LoraLayers, computing_device
from jackfield.contracts.settings import Settings
from jackfield.contracts.staging import StepBlock
from jackfield.devices import input_device
from jackfield.errors import SettingsError, UsageError, quoted
from jackfield.planning.beside import DEFAULT, Beside
from jackfield.spelling import nearest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from jackfield.contracts import ModelInputs, ScheduledSequence, Step


class Adapters:
    """The adapters that an engine holds. `asked`, `add` and `remove` may be called in any thread.

    Their matrices are kept in `dtype`. Raises CheckpointError for files that cannot be read.
    """

    def __init__(self, model: PreTrainedModel, beside: Beside, dtype: str) -> None:
        self._model = model
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._most = beside.most
        self._default = beside.default
        self._only = beside.loras[DEFAULT].adapter if beside.default else None
        self._layers = LoraLayers(model, beside.shard)
        self._block = StepBlock(input_device(model))
        self._lock = threading.Lock()
        self._named: dict[str, HeldLora] = {}
        self._alive: weakref.WeakSet[HeldLora] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._stale = False  # whether some came since the layers were built
        self._built = 0  # how many these hold; fewer are there when some have ended
        self._last: tuple[list[int], torch.Tensor] | None = None
        for name, found in sorted(beside.loras.items()):  # with one number in all processes
            self.add(name, found)

    @property
    def named(self) -> Mapping[str, Adapter]:
        """What a request may name."""
        with self._lock:
            return {} if self._only else {name: held.adapter for name, held in self._named.items()}

    def add(self, name: str, found: FoundLora) -> None:
        """Read a checked adapter and hold it. Raises CheckpointError, UsageError."""
        parts = {
            layer: part.to(computing_device(self._layer(layer, found)))
            for layer, part in read_lora(found, self._dtype).items()
        }
        held = HeldLora(next(self._numbers), found.adapter, parts)
        with self._lock:
            if name in self._named:
                raise UsageError(f"there is an adapter {name!r} already; unload it first")
            if len(self._alive) >= self._most:
                gc.collect()  # groups of beams that have ended may still have theirs
            if len(self._alive) >= self._most:
                raise UsageError(self._too_many(name))
            self._named[name] = held
            self._alive.add(held)
            self._stale = True

    def _layer(self, layer: str, found: FoundLora) -> nn.Module:
        try:
            return self._model.get_submodule(layer)
        except AttributeError:
            raise UsageError(
                f"the adapter {found.adapter.location} changes {layer}, which "
                f"{type(self._model).__name__} as it was loaded does not have"
            ) from None

    def _too_many(self, name: str) -> str:
        text = f"adapter {name!r}: {len(self._alive)} are held, and max_adapters={self._most}"
        if late := len(self._alive) - len(self._named):
            return f"{text}; {late} of them until their last requests have ended: wait for these"
        return f"{text}; unload one ({', '.join(self._named)}), or load with more max_adapters"

    def remove(self, name: str) -> None:
        """Know an adapter no more by its name. Requests that have it end with it. UsageError."""
        with self._lock:
            if name not in self._named:
                raise UsageError(f"there is no adapter {quoted(name)}{self._instead(name)}")
            del self._named[name]

    def asked(self, settings: Settings) -> tuple[HeldLora | None, Settings]:
        """The adapter of a request, and its settings with a salt of that adapter's own.

        Keys and values belong to what computed them. Raises SettingsError for an unknown name.
        """
        name = self._default if settings.adapter is None else settings.adapter
        with self._lock:
            if name is not None and name not in self._named:
                raise SettingsError(f"adapter={quoted(name)} is not loaded{self._instead(name)}")
            held = None if name is None else self._named[name]
        number = held.number if held else 0
        return held, settings._replace(cache_salt=f"{number} {settings.cache_salt}")

    def _instead(self, name: object) -> str:
        known = ", ".join(self._named) or "none"
        return f" (loaded: {known}){nearest(str(name), self._named)}"

    def numbered(self, number: int | None) -> HeldLora | None:
        """The one with this number, of those that it began with; None: none."""
        with self._lock:
            return next((one for one in self._named.values() if one.number == number), None)

    @contextlib.contextmanager
    def adapting(self, step: Step, inputs: ModelInputs) -> Iterator[None]:
        """Have forward calls within compute each token of a step with its sequence's adapter.

        Whoever else calls the model, before or behind a step, is given it without any.
        """
        self._choose(step, inputs)
        try:
            yield
        finally:
            self._layers.choose(None, (0, 0))

    @contextlib.contextmanager
    def alone(self, held: HeldLora | None, tokens: int) -> Iterator[None]:
        """Have a call within, which is no step's, compute one row of `tokens` with `held`."""
        self._settle()
        chosen = None if held is None else Chosen(None, [held.slot], self._layers.owners)
        self._layers.choose(chosen, (1, tokens))
        try:
            yield
        finally:
            self._layers.choose(None, (0, 0))

    def _choose(self, step: Step, inputs: ModelInputs) -> None:
        self._settle()
        rows, width = inputs.kwargs["input_ids"].shape
        adapters = list(map(_adapter_of, step.scheduled))
        slots = [NO_SLOT if held is None else held.slot for held in adapters]
        present = sorted({slot for slot in slots if slot != NO_SLOT})
        if not present:
            self._layers.choose(None, (rows, width))
            return
        alike = len(set(slots)) == 1
        chosen = None if alike else self._placed(step, inputs, slots)
        self._layers.choose(Chosen(chosen, present, self._layers.owners), (rows, width))
        for one in {id(held): held for held in adapters if held is not None}.values():
            one.steps += 1

    def _placed(self, step: Step, inputs: ModelInputs, slots: list[int]) -> torch.Tensor:
        """The slot of each token: int64 `[1, tokens]` packed, `[rows, 1]` padded."""
        if inputs.kwargs.get("past_key_values") is None:  # packed: one sequence after the other
            counts = [item.num_tokens + len(item.drafts) for item in step.scheduled]
            spread = [s for s, n in zip(slots, counts, strict=True) for _ in range(n)]
            return self._put(spread)[None]
        placed = self._put(slots)
        if inputs.row_of is not None:  # rows that wait, or idle, have none
            whole = torch.full((inputs.rows,), NO_SLOT, device=placed.device)
            placed = whole.index_copy(0, inputs.row_of, placed)
        return placed[:, None]

    def _put(self, slots: list[int]) -> torch.Tensor:
        """The numbers on the device, sent once while they stay the same."""
        if self._last is None or self._last[0] != slots:
            sent = self._block.put(slots)
            self._block.send()
            self._last = slots, sent.clone()
        return self._last[1]

    def _settle(self) -> None:
        """Between two steps: have the layers hold what there is now."""
        if not self._stale and len(self._alive) == self._built:
            return
        with self._lock:
            self._stale = False
            there = sorted(self._alive, key=lambda held: held.number)
            self._built = len(there)
        self._layers.build([held.parts for held in there])
        for slot, held in enumerate(there):
            held.slot = slot
        self._last = None

    def check_called(self) -> None:
        """After a forward call: raise ExecutionError where a layer was not reached."""
        self._layers.check_called()

    def steps(self) -> dict[str, int]:
        """In how many steps each adapter that a request may name was computed."""
        with self._lock:
            return {} if self._only else {name: held.steps for name, held in self._named.items()}

    # What an engine with one adapter for all requests asks of it, as of one that PEFT put there.

    def use(self) -> AdapterUse | None:
        """What the next step will do with the adapter of requests that name none."""
        if self._only is None:
            return None
        return AdapterUse(self._only, "on" if self._default else "off")

    def switch(self, *, on: bool) -> None:
        """Have requests that name no adapter use the one there is, or none. Raises UsageError."""
        if self._only is None:
            raise UsageError("requests have adapters of their own here; leave out adapter=…")
        self._default = DEFAULT if on else None

    def restore(self) -> None:
        """Give the model back as it was."""
        self._layers.remove()
        self._named.clear()


def _adapter_of(item: ScheduledSequence) -> HeldLora | None:
    sequence: Any = item.sequence  # the engine's own, or one that follows it in another process
    return sequence.adapter  # type: ignore[no-any-return]
