"""A traced step as plain data: what is read, which operators are called, what comes out.

Values are numbered: the inputs first, then what each node makes. So a graph can be written to a
file and read again without torch's own reader, which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """The value with this number."""

    at: int


class Meta(NamedTuple):
    """What a tensor is: dtype, shape and strides, in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Input(NamedTuple):
    """A tensor that is there before the step: `ids`, `positions`, `weight` or `constant`.

    `name` is that of a parameter or buffer of the model, or of a constant; `meta` what it was.
    """

    kind: str
    name: str
    meta: Meta


class Node(NamedTuple):
    """A call of the operator `target`, e.g. "aten.mul.Tensor"; arguments may hold `Ref`s."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any  # a Meta, a list of them, or None


@dataclass(eq=False)
class Graph:
    """One step, of ids `[rows, width]`.

    `constants` are tensors that belong to no module; by name.
    """

    rows: int
    width: int
    inputs: list[Input]
    nodes: list[Node]
    output: int
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def dump(self) -> bytes:
        """As JSON. Raises ValueError for a graph with constants."""
        nodes = [[n.target, _plain(n.args), _plain(n.kwargs), _plain(n.out)] for n in self.nodes]
        if self.constants:
            raise ValueError(f"constants cannot be kept: {', '.join(self.constants)}")
        size = {"rows": self.rows, "width": self.width, "output": self.output}
        inputs = [[kind, name, _plain(meta)] for kind, name, meta in self.inputs]
        return json.dumps({**size, "inputs": inputs, "nodes": nodes}).encode()

    @classmethod
    def load(cls, content: bytes) -> Graph:
        """What `dump` wrote. Raises ValueError, KeyError, TypeError for anything else."""
        whole = json.loads(content)
        nodes = [Node(t, tuple(_rich(a)), _rich(k), _rich(o)) for t, a, k, o in whole["nodes"]]
        inputs = [Input(kind, name, _rich(meta)) for kind, name, meta in whole["inputs"]]
        return cls(whole["rows"], whole["width"], inputs, nodes, whole["output"])


def meta_of(tensor: torch.Tensor) -> Meta:
    """What a tensor is."""
    return Meta(tensor.dtype, tuple(tensor.shape), tensor.stride())


def refs(argument: Any) -> list[int]:
    """The values that an argument reads."""
    if isinstance(argument, Ref):
        return [argument.at]
    if isinstance(argument, Meta):
        return []
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, list | tuple):
        return [at for one in argument for at in refs(one)]
    return []


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """The same node where values have other numbers; those that are not named keep theirs."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(numbers.get(argument.at, argument.at))
        if isinstance(argument, Meta):
            return argument
        if isinstance(argument, dict):
            return {name: moved(one) for name, one in argument.items()}
        if isinstance(argument, list | tuple):
            return [moved(one) for one in argument]
        return argument

    return node._replace(args=tuple(moved(node.args)), kwargs=moved(node.kwargs))


_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def _plain(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.at}
    if isinstance(value, Meta):
        return {"meta": [_plain(value.dtype), list(value.shape), list(value.stride)]}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, dict):
        return {"dict": {key: _plain(one) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{type(value).__name__} cannot be kept")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "ref":
        return Ref(held)
    if kind == "meta":
        dtype, shape, stride = held
        return Meta(_rich(dtype), tuple(shape), tuple(stride))
    if kind == "torch":
        found = getattr(torch, held)
        if not isinstance(found, _NAMED):
            raise ValueError(f"torch.{held} is no dtype, layout or memory format")
        return found
    if kind == "device":
        return torch.device(held)
    return {key: _rich(one) for key, one in held.items()}
