"""From a model's step to a `Graph`: torch.export reads it, this writes down what it read."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export.graph_signature import InputKind

from jackfield.contracts.compiling import TRACING
from jackfield_plugins.compiler.native.graph import Graph, Input, Node, Ref, meta_of

#: Operators of a traced step that compute nothing.
_CHECKS = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"})
_PREFIX = "model."
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Step(nn.Module):
    def __init__(self, model: nn.Module, step: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._step = step

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._step(ids, positions, None)


class UntraceableError(Exception):
    """Says why a step is not a graph of operators on tensors."""


def trace(step: Callable[..., Any], model: nn.Module, rows: int, width: int) -> Graph:
    """The graph of `step` for ids and positions `[rows, width]`. Raises UntraceableError.

    After torch.export, non-strict: the model's Python runs once, on tensors without data.
    """
    example = torch.zeros(rows, width, dtype=torch.int64)
    with TRACING, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            _Step(model, step), (example, example.clone()), strict=False
        ).run_decompositions({})
    signature = exported.graph_signature
    if changed := signature.buffers_to_mutate:
        raise UntraceableError(f"a step changes {', '.join(sorted(changed.values()))} of the model")
    return _Writer(exported, rows, width).write()


class _Writer:
    def __init__(self, exported: Any, rows: int, width: int) -> None:
        self._exported = exported
        self._graph = Graph(rows, width, [], [], 0)
        self._values: dict[Any, Ref] = {}

    def write(self) -> Graph:
        specs = {spec.arg.name: spec for spec in self._exported.graph_signature.input_specs}
        nodes = list(self._exported.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._values[node] = Ref(len(self._graph.inputs))
                self._graph.inputs.append(self._input(node, specs[node.name]))
        for node in nodes:
            if node.op == "call_function" and str(node.target) not in _CHECKS:
                self._call(node)
        (output,) = next(node for node in nodes if node.op == "output").args
        (logits,) = output
        self._graph.output = self._values[logits].at
        return self._graph

    def _input(self, node: Any, spec: Any) -> Input:
        meta = _meta(node.meta["val"])
        if spec.kind is InputKind.USER_INPUT:
            return Input(node.name, "", meta)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return Input("weight", spec.target.removeprefix(_PREFIX), meta)
        if not isinstance(found := self._exported.constants.get(spec.target), torch.Tensor):
            raise UntraceableError(f"it reads {spec.target}, which is no tensor")
        self._graph.constants[node.name] = found
        return Input("constant", node.name, meta)

    def _call(self, node: Any) -> None:
        if isinstance(node.target, HigherOrderOperator):
            inner = node.args[0] if node.args else None
            if isinstance(inner, OpOverload):  # as torch.export says it
                raise UntraceableError(
                    f"it calls {inner}, which changes its arguments; have it return what it makes"
                )
            raise UntraceableError(f"it calls {node.target}, which is no operator on tensors")
        target = "getitem" if node.target is operator.getitem else str(node.target)
        if target == "aten.alias.default" or target == "aten.detach.default":
            self._values[node] = self._values[node.args[0]]
            return
        self._values[node] = Ref(len(self._graph.inputs) + len(self._graph.nodes))
        if target == "aten.as_strided.default":
            node.args = _without_offset(*node.args)
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        args = tuple(self._argument(value) for value in node.args)
        self._graph.nodes.append(Node(target, args, kwargs, _meta(node.meta["val"])))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._values[value]
        if isinstance(value, list | tuple):
            return [self._argument(one) for one in value]
        if isinstance(value, _SYMBOLS):
            raise UntraceableError("sizes depend on what is in the tensors")
        return value


def _without_offset(of: Any, size: Any, stride: Any, offset: int | None = None) -> tuple[Any, ...]:
    """The same view from where a value begins, which in a program lies elsewhere in memory."""
    if offset is not None and offset != of.meta["val"].storage_offset():
        raise UntraceableError("it reads a tensor from elsewhere in memory (as_strided)")
    return of, size, stride


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = meta_of(value)
        if not all(type(n) is int for n in meta.shape + meta.stride):
            raise UntraceableError("sizes depend on what is in the tensors")
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise UntraceableError(f"a tensor of it is {value.layout} on {value.device}")
        return meta
    if isinstance(value, list | tuple):
        return [_meta(one) for one in value]
    if isinstance(value, _SYMBOLS):
        raise UntraceableError("Python reads what is in a tensor (item, float, int)")
    return None
