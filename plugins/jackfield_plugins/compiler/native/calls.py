"""Calls of compiled functions, one after another, without Python in between."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jackfield.contracts import NativeCall, NativeOffers
from jackfield.contracts.native import ROOM
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.native.operators import cleared

if TYPE_CHECKING:
    import torch

_INSTRUCTION = struct.Struct("@2q")  # `struct Instruction` in kernel.cpp

Run = Callable[[int, int], int]


class Done(NamedTuple):
    """A call whose arguments are known. `sibling`: it may run together with the one before it."""

    name: str
    call: NativeCall
    sibling: bool = False


class Attend(NamedTuple):
    """An attention: calls that are known in each step, or the operator, from Python."""

    layer: int
    output: torch.Tensor
    arguments: tuple[Any, ...]
    run: Callable[[], None]


class PythonCall(NamedTuple):
    """What has no native form: an operator, called from Python on the tensors of the step."""

    name: str
    run: Callable[[], None]


Call = Done | Attend | PythonCall


class Stretch:
    """Native calls that follow one another. `arguments` are held here, at fixed places."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._names: list[str] = []
        self._held: list[Any] = []
        self._keeps: dict[int, Any] = {}  # of calls that were put in their places
        self._packed: list[bytes] = []

    def add(self, name: str, call: NativeCall) -> None:
        memory = ctypes.create_string_buffer(call.arguments, len(call.arguments))
        self._place(name, call.function, memory)
        self._held.append(call.keeps)

    def reserve(self, name: str) -> tuple[int, int]:
        """Room for a call to come: its number, and where its arguments go."""
        memory = ctypes.create_string_buffer(ROOM)
        self._place(name, 0, memory)
        return len(self._names) - 1, ctypes.addressof(memory)

    def _place(self, name: str, function: int, memory: Any) -> None:
        self._held.append(memory)
        self._names.append(name)
        self._packed.append(_INSTRUCTION.pack(function, ctypes.addressof(memory)))

    def close(self) -> None:
        """No more calls come."""
        whole = b"".join(self._packed)
        self._instructions = ctypes.create_string_buffer(whole, len(whole))
        self._first, self._count = ctypes.addressof(self._instructions), len(self._names)

    def put(self, at: tuple[int, int], call: NativeCall) -> None:
        """Have call number `at` be this one, from the next run on."""
        number, place = at
        self._keeps[number] = call.keeps
        ctypes.memmove(place, call.arguments, len(call.arguments))
        struct.pack_into("@q", self._instructions, number * _INSTRUCTION.size, call.function)

    def __call__(self) -> None:
        failed = self._run(self._first, self._count)
        if failed >= 0:
            name = self._names[failed]
            if name.startswith("aten."):
                raise ExecutionError(
                    f"{name} cannot compute what it was given: a number in it leads out of its "
                    "table"
                )
            raise ExecutionError(f"{name} says that it cannot compute what it was given")


class Sequential:
    """`calls` in their order, in as few stretches as possible; attentions go through Python."""

    def __init__(self, calls: Sequence[Call], run: Run) -> None:
        self._run = run
        self._parts: list[Callable[[], None]] = []
        self._stretch: Stretch | None = None  # to which native calls are added
        for call in calls:
            self._add(call)
        for part in self._parts:
            if isinstance(part, Stretch):
                part.close()

    def _add(self, call: Call) -> None:
        if isinstance(call, Done):
            self._native().add(call.name, call.call)
        else:
            self._parts.append(call.run)
            self._stretch = None

    def _native(self) -> Stretch:
        if self._stretch is None:
            self._parts.append(stretch := Stretch(self._run))
            self._stretch = stretch
        return self._stretch

    def __call__(self) -> bool:
        """Whether it ran."""
        for run in self._parts:
            run()
        return True


class Whole(Sequential):
    """The same with attentions as native calls, which are asked for where those of before are over.

    Of `offered`, `attended` is told the layers after each run.
    """

    def __init__(self, calls: Sequence[Call], run: Run, offered: NativeOffers) -> None:
        self._ask, self._again, self._attended = offered.attention, offered.again, offered.attended
        self._attends: list[tuple[Attend, Stretch, tuple[tuple[int, int], ...]]] = []
        super().__init__(calls, run)
        self._layers = [call.layer for call, *_ in self._attends]
        self._outputs = {call.layer: call.output for call, *_ in self._attends}
        self._once = len(self._outputs) == len(self._layers)  # no layer attends twice
        self._ready = False  # the calls that were given last are in their places

    def _add(self, call: Call) -> None:
        if isinstance(call, Attend):
            stretch, name = self._native(), f"the attention of layer {call.layer}"
            places = (stretch.reserve(name), stretch.reserve(name))  # to store, to attend
            self._attends.append((call, stretch, places))
        else:
            super()._add(call)

    def __call__(self) -> bool:
        """Whether it ran; if not, some attention has no native calls now, and nothing ran."""
        if not ((self._ready and self._again(self._outputs)) or self._asked()):
            return False
        super().__call__()
        self._attended(self._layers)
        return True

    def _asked(self) -> bool:
        """Put the calls of this step in their places; whether there are any."""
        self._ready, ask = False, self._ask
        for call, stretch, places in self._attends:
            native = ask(call.output, *call.arguments)
            if native is None:
                return False
            if len(native) < len(places):  # another layer stores, so here is something idle
                native = [cleared(call.output), *native]
            for place, one in zip(places, native, strict=True):
                stretch.put(place, one)
        self._ready = self._once
        return True
