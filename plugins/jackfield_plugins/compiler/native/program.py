"""A graph laid out in memory: each operator on its tensors, in the order in which they run."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jackfield_plugins.compiler.native.calls import (
    Attend,
    Call,
    Done,
    PythonCall,
    Run,
    Sequential,
    Whole,
)
from jackfield_plugins.compiler.native.entering import entered, operator
from jackfield_plugins.compiler.native.fusing import fused
from jackfield_plugins.compiler.native.graph import Graph, Node, Ref, meta_of
from jackfield_plugins.compiler.native.head import Head
from jackfield_plugins.compiler.native.joining import copies
from jackfield_plugins.compiler.native.linears import KERNEL, linear
from jackfield_plugins.compiler.native.memory import Places
from jackfield_plugins.compiler.native.operators import cleared, native_calls
from jackfield_plugins.compiler.native.siblings import LINEARS, joined, side_by_side
from jackfield_plugins.compiler.native.views import CREATED, is_view

if TYPE_CHECKING:
    from jackfield.contracts import NativeCall, NativeOffers

#: The operator behind which the compiled part of a step ends; see `Compilation.compile`.
ATTEND = "jackfield.attend.default"


class StaleError(Exception):
    """Says which tensor of a model a graph does not fit any more."""


class Program:
    """One step of one size, to be run on ids and positions of that size.

    `read` finds a weight by its name; `offered` is asked for what other backends of the plan have.
    `python` counts the operators, attentions aside, for which every step goes back to Python; by
    name.

    Raises:
        StaleError: A weight is not what the graph was traced with.
    """

    def __init__(
        self, graph: Graph, read: Callable[[str], torch.Tensor], offered: NativeOffers
    ) -> None:
        self.python: Counter[str] = Counter()
        self.steps = self.attended_in_python = 0  # that decode, so far
        self._native = offered.operators
        graph = fused(graph, self._native)
        graph, self._siblings = side_by_side(graph, LINEARS | self._native.keys())
        self._places = Places(graph)
        size = (graph.rows, graph.width)
        self._fed = {kind: torch.zeros(size, dtype=torch.int64) for kind in ("ids", "positions")}
        self._values: list[Any] = [self._input(graph, i, read) for i in range(len(graph.inputs))]
        self._calls: list[Call] = []
        for node in graph.nodes:
            self._values.append(self._laid(node, len(self._values)))
        self._logits = self._values[graph.output]
        run = KERNEL.library()["run"]
        run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
        self._head = self._end(graph, run)
        calls = joined(self._calls)
        self._whole = Whole(calls, run, offered)
        self._parts = Sequential(calls, run)

    @property
    def num_bytes(self) -> int:
        """What the values between the weights and the logits take."""
        return self._places.num_bytes

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits `[rows, width, vocab]`, or of the columns `keep`, overwritten by the next call.

        Raises ExecutionError.
        """
        self._fed["ids"].copy_(ids)
        self._fed["positions"].copy_(positions)
        if not self._whole():
            self._parts()
            self.attended_in_python += keep is None  # of prompts it may be better so
        self.steps += keep is None
        if self._head is not None:
            return self._head(keep)
        logits: torch.Tensor = self._logits
        return logits if keep is None else logits[:, keep]

    def _end(self, graph: Graph, run: Run) -> Head | None:
        """The product that makes the logits, which then is no more among the calls; None: another
        operator does, or not for each token by itself."""
        node, last = graph.nodes[-1], self._calls[-1]
        value = len(graph.inputs) + len(graph.nodes) - 1
        if value != graph.output or value in self._siblings or not isinstance(last, Done):
            return None
        made = linear if node.target == "aten.linear.default" else self._native.get(node.target)
        hidden, *rest = self._argument(node.args) or [None]
        if made is None or not isinstance(hidden, torch.Tensor) or last.name != node.target:
            return None
        if (
            not last.call.by_row
            or hidden.dim() != 3
            or hidden.shape[:2] != (graph.rows, graph.width)
        ):
            return None
        self._calls.pop()
        kwargs, product = self._argument(node.kwargs), made

        def make(out: torch.Tensor, hidden: torch.Tensor) -> NativeCall | None:
            return product(out, hidden, *rest, **kwargs)

        return Head(make, hidden, self._logits, last.call, run)

    def _input(self, graph: Graph, at: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        kind, name, meta = graph.inputs[at]
        if kind in self._fed:
            return self._fed[kind]
        found = read(name).detach() if kind == "weight" else graph.constants[name]
        there = found.device.type == "cpu" and found.layout is torch.strided
        if not (there and meta_of(found) == meta and (found.data_ptr() or not found.numel())):
            raise StaleError(f"{name} is not what it was when the step was traced")
        return found

    def _laid(self, node: Node, value: int) -> Any:
        """Have `node` run behind those before it; what it makes, where it will be."""
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        if node.target == "getitem":
            return args[0][args[1]]
        if is_view(node):
            return operator(node.target)(*args, **kwargs)
        if node.target in CREATED:
            made = operator(node.target)(*args, **kwargs)
            if isinstance(made, torch.Tensor) and meta_of(made) == node.out:
                return made
        out = self._places.of(value, node.out)
        if (parts := copies(node.target, out, args, kwargs)) is not None:
            for place, source in parts:
                self._copy(node.target, place, source)
            return out
        if (offered := self._native.get(node.target)) is not None:
            call = offered(out, *args, **kwargs)
            calls = None if call is None else [call]
        else:
            calls = native_calls(node.target, args, kwargs, out)
        if calls is None:
            self._enter_python(node.target, args, kwargs, out)
        for call in calls or []:
            self._calls.append(Done(node.target, call, value in self._siblings))
        return out

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Ref):
            return self._values[given.at]
        if isinstance(given, dict):
            return {name: self._argument(one) for name, one in given.items()}
        if isinstance(given, list | tuple):
            return [self._argument(one) for one in given]
        return given

    def _copy(self, target: str, place: torch.Tensor, source: torch.Tensor) -> None:
        """Have `source` be copied to `place`, which broadcasts it."""
        calls = native_calls("aten._to_copy.default", [source], {}, place)
        if calls is None:
            self._enter_python("aten.copy.default", [place, source], {}, place)
        self._calls += [Done(target, call) for call in calls or []]

    def _enter_python(self, target: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        call = entered(target, args, kwargs, out)
        if target == ATTEND:
            if len(out) * out.shape[1] > 1:  # there may be tokens that are nobody's
                self._calls.append(Done(target, cleared(out)))
            self._calls.append(Attend(args[3], out, tuple(args), call))
        else:
            self.python[target] += 1
            self._calls.append(PythonCall(target, call))
