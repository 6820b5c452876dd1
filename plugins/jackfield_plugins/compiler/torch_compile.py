"""`torch.compile` with what an engine needs beside it: shapes, counts and plain errors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import types
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jackfield.contracts import Compilation
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.holding import Held

if TYPE_CHECKING:
    from torch import nn

    from jackfield.contracts.compiling import ModelStep

#: From a traced graph and an example of its inputs to what runs in its place.
Lower = Callable[[Any, Any], Callable[..., Any]]

_numbers = itertools.count()

_PARTICULARS = ("Developer debug context:", "Caused by:")  # how torch begins the line with them


class TorchCompilation(Compilation):
    """One function of `torch.compile` for each shape, so that each is one graph.

    torch keeps graphs by code object and runs what exceeds a limit uncompiled; a code object for
    each function leaves every engine and every shape its own. It also remembers by file, line and
    name which numbers have changed from call to call, and makes them inputs: the numbers of
    another model, which are inputs made anew in every step; so each has a name of its own too.
    `name` is the backend's. `bucketed`: a graph for each power of two, up to which steps are
    filled; otherwise one for a single token and one for any number of them.

    torch calls `lower` with each graph that it traced of what `compile` is given.
    """

    name: ClassVar[str]
    closely: ClassVar[bool] = False  # that the model is looked at, in every step

    def __init__(
        self, model: nn.Module, source: str, *, bucketed: bool, prefill: bool = False
    ) -> None:
        self.source = source
        self._prefill = prefill
        self._bucketed = bucketed
        self._model = model
        self._held: Held | None = None
        self._functions: list[dict[tuple[int | None, ...], ModelStep]] = []
        self._began = 0.0
        self._collects = False

    def reads(self, rows: int, width: int) -> bool:
        """All prompts, where that was asked for."""
        return self._prefill

    @abstractmethod
    def lower(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Make what runs in place of a traced `graph`, given an example of its inputs.

        Calls `count` when that is done, or when it is done at its first call.
        """

    def count(self) -> None:
        """Another graph was made, since the step that needs it began."""
        self.graphs += 1
        self.seconds += time.perf_counter() - self._began

    def fill(self, count: int) -> int:
        """The next power of two, where shapes are bucketed."""
        return 1 << (count - 1).bit_length() if self._bucketed else count

    def compile(self, step: ModelStep) -> ModelStep:
        return self._compiled(step, self.lower, bucketed=self._bucketed)

    def _compiled(self, step: ModelStep, lower: Lower, *, bucketed: bool) -> ModelStep:
        """`step` with a graph for each shape, or `bucketed` or not, made by `lower`."""
        compiled: dict[tuple[int | None, ...], ModelStep] = {}
        self._functions.append(compiled)

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            self._look()
            shape: tuple[int | None, ...] = (*ids.shape, None if keep is None else len(keep))
            if not bucketed:  # one is always special; else what a size is means nothing
                shape = tuple(n and min(n, 2) for n in shape)
            if shape not in compiled:
                compiled[shape] = self._of_one_shape(step, lower, bucketed)
                if not bucketed:
                    _mark(ids, positions, keep)
            self._began = time.perf_counter()
            self._collects = gc.isenabled()
            try:
                with _collecting(False):
                    return compiled[shape](ids, positions, keep)
            except ExecutionError:
                raise
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch._dynamo.exc.FailOnRecompileLimitHit,
            ) as error:
                inner = getattr(error, "inner_exception", error)
                if isinstance(inner, ExecutionError):
                    raise inner from None
                raise ExecutionError(self.complaint(error)) from error

        return run

    def _of_one_shape(self, step: ModelStep, lower: Lower, bucketed: bool) -> ModelStep:
        def traced(graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
            with _collecting(self._collects):  # it can take minutes, and leaves much behind
                return lower(graph, inputs)

        own = types.FunctionType(
            step.__code__.replace(co_name=f"{step.__name__}_{next(_numbers)}"),
            step.__globals__,
            step.__name__,
            None,
            step.__closure__,
        )
        return torch.compile(
            own,
            backend=traced,
            fullgraph=True,
            dynamic=False if bucketed else None,  # else torch frees a size that differs
            options={"guard_filter_fn": _without_tables},
        )

    def _look(self) -> None:
        """Forget what does not hold any more, torch's functions for steps and what is made of them.

        torch itself sees neither a hook that comes nor one that goes; it keeps what it made for
        other settings, an adapter that is switched off for example.
        """
        held, anew = self._held, self.anew
        self.anew = False  # before it is looked at: what comes meanwhile is looked at again
        if held is not None and not anew and (not self.closely or held.next_is_same()):
            return
        if held is not None and not held.is_code():
            for functions in self._functions:
                functions.clear()
        if held is None or not (held.is_structure() and held.is_place()):
            self._moved()
            self._held = Held(self._model, closely=self.closely)

    def _moved(self) -> None:
        """The model is not what it was, or its weights lie elsewhere."""

    def close(self) -> None:
        """Let go of the model. torch keeps `lower`, and so this object, as long as the process."""
        for functions in self._functions:
            functions.clear()
        self._held = None
        vars(self).pop("_model", None)

    def complaint(self, error: BaseException) -> str:
        model = type(self._model).__name__
        return f"{self.name} cannot compile {model}: {cause(error)}; load it without compile"


def _mark(*tensors: torch.Tensor | None) -> None:
    """Let a graph hold for any size but one; `dynamic=True` would free other numbers, too."""
    for tensor in tensors:
        for at, size in enumerate(() if tensor is None else tensor.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, at)


def cause(error: BaseException) -> str:
    """One line of what torch tells in many: what it met, and where it says so, in which form."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    for begin in _PARTICULARS:
        for line in lines[1:]:
            if line.startswith(begin):
                return f"{first} ({line.removeprefix(begin).strip()})"
    errors = (line for line in lines[1:] if " error: " in line)  # of the C++ compiler
    return " ".join((first, *list(errors)[:1]))


def _without_tables(guards: Sequence[Any]) -> list[bool]:
    """All of torch's guards but those on the keys of transformers' tables of attentions.

    An engine that is loaded or closed elsewhere changes them; our own entry stays guarded.
    """
    return [not guard.name.endswith("['_global_mapping']") for guard in guards]


@contextlib.contextmanager
def _collecting(on: bool) -> Iterator[None]:
    """Have the garbage collector on, or off; nothing happens where it is so already.

    Between a call of what is compiled and its first operation torch takes every function that
    starts in this thread for a part of it. So it would trace the finalizers that the collector
    runs there: they would count as graphs, or fail and leave undone what they are for.
    """
    if gc.isenabled() == on:
        yield
        return
    switch = (gc.disable, gc.enable)
    switch[on]()
    try:
        yield
    finally:
        switch[not on]()
