"""Layers with a state (state-space models, linear attention, short convolutions) in packed steps.

Such a layer reads a row of tokens into a state of fixed size, and has no place for the tokens of
several sequences in one row. So its calls are taken apart: sequences that feed one token are rows
of one call, the others are called one after another, and each has the state of its own. What the
layer computes is its own code, which reads and writes its state through a `transformers.Cache`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from jackfield.bridge.model_layers import attention_modules, layer_types, looks_up
from jackfield.errors import ExecutionError

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHE = ("cache_params", "past_key_values")  # what mixers call it


def state_modules(model: PreTrainedModel) -> dict[int, nn.Module] | None:
    """The modules that write a state into the cache, by their layers' numbers.

    None where one does other work as well, so that nobody can keep it apart for each sequence.
    """
    if not hasattr(Cache, "get_conv_state"):
        return None  # in transformers 5.17 prompts in pieces of one token are wrong (Zamba2)
    attending = {id(module) for _, module in attention_modules(model) if _attends(module)}
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        cls: Any = type(module)
        if not _keeps_state(cls):
            continue
        number = getattr(module, "layer_idx", None)
        mixed = any(id(part) in attending for part in module.modules())
        if not isinstance(number, int) or number in found or mixed or not _cache_name(module):
            return None
        found[number] = module
    return found


def states_apart(model: PreTrainedModel, states: Sequence[tuple[int, int]]) -> bool:
    """Whether each layer with a state has a module of `state_modules`.

    `states` are those that a probe saw, none where it saw nothing.
    """
    kinds = enumerate(layer_types(model.config))
    due = {i for i, kind in kinds if kind == "linear_attention" and (not states or any(states[i]))}
    modules = state_modules(model)
    return modules is not None and modules.keys() == due


def _attends(module: nn.Module) -> bool:
    cls: Any = type(module)
    return looks_up(cls)


@functools.cache
def _keeps_state(cls: Any) -> bool:
    """Whether the code of a class writes a state into its cache."""
    # Kernels of the hub and the like are wrapped around it.
    parts = (part for base in cls.__mro__ for part in vars(base).values())
    functions = (inspect.unwrap(f) for f in parts if isinstance(f, FunctionType))
    return any(not _UPDATES.isdisjoint(f.__code__.co_names) for f in functions)


def _cache_name(module: nn.Module) -> str | None:
    taken = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE if name in taken), None)


class StateRows(NamedTuple):
    """One sequence's part of a step: its tokens are `begin` to `end` of the row."""

    sequence: int
    begin: int
    end: int


class State(LinearAttentionLayer):
    """What some sequences have in one layer: row i of each tensor is of the i-th."""

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        """The rows of several, in their order; a copy."""
        return states[0]._with(lambda name, i: torch.cat([getattr(s, name)[i] for s in states]))

    def row(self, number: int) -> State:
        """One of its rows; a view."""
        return self._with(lambda name, i: getattr(self, name)[i][number : number + 1])

    def copy(self) -> State:
        """The same in memory of its own."""
        return self._with(lambda name, i: getattr(self, name)[i].clone())

    def _with(self, tensor: Callable[[str, int], torch.Tensor]) -> State:
        found = type(self)(self.number_of_states)
        for name in ("conv_states", "recurrent_states"):
            for index, own in getattr(self, name).items():
                getattr(found, name)[index] = None if own is None else tensor(name, index)
        for name in (
            "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state",
            "conv_kernel_size",
        ):  # fmt: skip
            setattr(found, name, dict(getattr(self, name)))
        found.dtype, found.device = self.dtype, self.device
        return found

    @property
    def num_bytes(self) -> int:
        tensors = [*self.conv_states.values(), *self.recurrent_states.values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class StateLayer:
    """The states of one layer: each sequence's, and as one batch of those that decode together.

    As long as the same ones decode, the batch stays as it is and nothing is copied.
    """

    def __init__(self, module: nn.Module, number: int, states: int) -> None:
        self._module, self._number, self._states = module, number, states
        self._cache = str(_cache_name(module))
        self._apart: dict[int, State] = {}
        self._members: tuple[int, ...] = ()  # whose rows `_batch` has
        self._batch: State | None = None
        self._rows: Sequence[StateRows] = ()  # of the step that is under way
        self._thread: int | None = None  # which computes it
        self._calls = 0

    def install(self) -> Callable[[], None]:
        """Have the module compute steps of ours so. Returns what gives it back."""
        module = self._module
        before = vars(module).get("forward")
        self._inner = module.forward
        self._signature = inspect.signature(self._inner)
        module.forward = mine = self._forward

        def restore() -> None:
            if vars(module).get("forward") != mine:  # somebody's later wish
                return
            if before is None:
                del module.forward  # what shows again is the method of its class
            else:
                module.forward = before

        return restore

    def begin(self, rows: Sequence[StateRows]) -> None:
        """This thread computes a step now; what others call meanwhile is theirs."""
        self._rows, self._thread, self._calls = rows, threading.get_ident(), 0

    def end(self) -> None:
        """The step was computed, or failed."""
        self._thread = None

    def check_called(self) -> None:
        """Raise ExecutionError where the module was not called once in the step."""
        if self._calls != 1:
            raise ExecutionError(
                f"{type(self._module).__name__} of layer {self._number} was called {self._calls} "
                "times in a step through the engine, which keeps its state; leave its forward as "
                "it is while an engine has the model"
            )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._thread != threading.get_ident():  # somebody else's call
            return self._inner(*args, **kwargs)
        self._calls += 1
        rows = self._rows
        given, tokens = self._by_name(args, kwargs), rows[-1].end
        out: dict[int, Any] = {}
        decoding = [r for r in rows if r.end - r.begin == 1 and self._has(r.sequence)]
        if decoding:
            found = self._call(_in_rows(given, tokens, decoding), self._together(decoding))
            if len(decoding) == tokens:
                return _in_a_row(found, tokens)
            out = {row.begin: _row(found, n, len(decoding)) for n, row in enumerate(decoding)}
        for row in rows:
            if row.begin not in out:
                own = _cut(given, tokens, row.begin, row.end)
                out[row.begin] = self._call(own, self._alone(row.sequence))
        return _joined([out[row.begin] for row in rows])

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = self._signature.bind(*args, **kwargs).arguments
        for name in list(given):
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name)
        return given

    def _call(self, given: dict[str, Any], state: State) -> Any:
        return self._inner(**{**given, self._cache: Cache(layers=[state] * (self._number + 1))})

    def _has(self, sequence: int) -> bool:
        return sequence in self._apart or sequence in self._members

    def _together(self, rows: Sequence[StateRows]) -> State:
        sequences = tuple(row.sequence for row in rows)
        if sequences != self._members or self._batch is None:
            self._part()
            self._batch = State.joined([self._apart.pop(one) for one in sequences])
            self._members = sequences
        return self._batch

    def _part(self) -> None:
        if self._batch is not None:
            for n, sequence in enumerate(self._members):
                self._apart[sequence] = self._batch.row(n)
        self._batch, self._members = None, ()

    def _alone(self, sequence: int) -> State:
        """The state of one sequence by itself; an empty one where it has none yet."""
        if sequence in self._members:
            self._part()
        return self._apart.setdefault(sequence, State(self._states))

    def drop(self, sequences: Iterable[int]) -> None:
        """Forget them."""
        gone = set(sequences)
        if not gone.isdisjoint(self._members):
            self._part()
        for sequence in gone:
            self._apart.pop(sequence, None)

    def fork(self, copies: Sequence[tuple[int, int]]) -> None:
        """Give the second of each pair what the first has."""
        found = {into: self._alone(source).copy() for source, into in copies}
        self._apart.update(found)

    def clear(self) -> None:
        """Forget all."""
        self._apart.clear()
        self._batch, self._members = None, ()

    @property
    def num_bytes(self) -> int:
        """What the states take."""
        states = [*self._apart.values(), *([] if self._batch is None else [self._batch])]
        return sum(state.num_bytes for state in states)


def _each(value: Any, shape: tuple[int, int], change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with the tensors in it that begin with these two dimensions changed."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.shape[:2] == shape else value
    if isinstance(value, dict):
        return {name: _each(one, shape, change) for name, one in value.items()}
    return tuple(_each(v, shape, change) for v in value) if isinstance(value, tuple) else value


def _in_rows(given: Any, tokens: int, decoding: Sequence[StateRows]) -> Any:
    """The tokens of sequences that feed one each, as the rows of a batch.

    They are cut out where they lie: an index would be a copy to the device, which waits.
    """
    runs: list[tuple[int, int]] = []
    for row in decoding:
        follows = runs and runs[-1][1] == row.begin
        runs[-1:] = [(runs[-1][0], row.end)] if follows else [*runs[-1:], (row.begin, row.end)]

    def rows(x: torch.Tensor) -> torch.Tensor:
        parts = [x[:, begin:end] for begin, end in runs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(0, 1)

    return _each(given, (1, tokens), rows)


def _in_a_row(found: Any, rows: int) -> Any:
    return _each(found, (rows, 1), lambda x: x.transpose(0, 1))


def _cut(given: Any, tokens: int, begin: int, end: int) -> Any:
    return _each(given, (1, tokens), lambda x: x[:, begin:end])


def _row(found: Any, number: int, rows: int) -> Any:
    return _each(found, (rows, 1), lambda x: x[number : number + 1])


def _joined(parts: Sequence[Any]) -> Any:
    """Outputs of parts of a step as that of the step."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(own) for own in zip(*parts, strict=True))
    return torch.cat(list(parts), dim=1)


def state_layers(model: PreTrainedModel) -> list[StateLayer]:
    """Those of `model`, none where there are none; see `state_modules`, which must not say None."""
    kinds = DynamicCache(config=model.config).layers
    return [
        StateLayer(module, number, getattr(kinds[number], "number_of_states", 1))
        for number, module in (state_modules(model) or {}).items()
    ]
