"""A traced step, cut at its attentions into stretches that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

_ATTEND = "jackfield::attend"

#: `Recorder.record`.
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


class Stretches:
    """A graph whose stretches between attentions are recordings.

    `recorded`: some were recorded since somebody set it to False.
    """

    def __init__(self, graph: torch.fx.GraphModule, record: Record) -> None:
        self.recorded = False
        self._record = record
        self._all: list[Stretch] = []
        self._whole = split_module(graph, graph, _numbered(graph), keep_original_order=True)
        for name, part in list(self._whole.named_children()):
            if not any(map(_attends, part.graph.nodes)):  # type: ignore[union-attr,arg-type]
                stretch = Stretch(part, self)
                self._all.append(stretch)
                setattr(self._whole, name, stretch)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self._whole(*tensors)

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made = self._record(run)
        self.recorded = True
        return made

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies at the same place in each step: a weight, or what is recorded."""
        if getattr(tensor, "_dynamo_static_input_type", None) is not None:  # so torch marks weights
            return True
        return any(tensor is left for stretch in self._all for left in stretch.outputs)


class Stretch(torch.nn.Module):
    """What a step does between two attentions.

    Tensors that stay where they are are read there. Others are copied to where the recording reads.
    """

    def __init__(self, run: torch.nn.Module, step: Stretches) -> None:
        super().__init__()
        self.outputs: Sequence[torch.Tensor] = ()
        self._run = run
        self._step = step
        self._reads: list[_Read] = []
        self._result: Any = None
        self._play: Callable[[], None] | None = None

    def forward(self, *tensors: torch.Tensor) -> Any:
        if self._play is None or any(map(_Read.misses, self._reads, tensors)):
            self._record(tensors)
        for read, given in zip(self._reads, tensors, strict=True):
            if not read.stays:
                read.tensor.copy_(given)
        assert self._play is not None
        self._play()
        return self._result

    def _record(self, tensors: Sequence[torch.Tensor]) -> None:
        self._play, self.outputs = None, ()
        self._reads = [_Read(given, self._step.stays(given)) for given in tensors]
        inputs = [read.tensor for read in self._reads]
        self._result, play = self._step.record(lambda: self._run(*inputs))
        self.outputs = self._result if isinstance(self._result, tuple) else (self._result,)
        self._play = play


class _Read:
    """Where a recording reads a tensor: where it is, if it `stays` there, or a place of its own."""

    def __init__(self, tensor: torch.Tensor, stays: bool) -> None:
        self.stays = stays
        self.tensor = tensor if stays else tensor.clone()
        self._address = self.tensor.data_ptr()  # a weight can be moved: `weight.data = …`

    def misses(self, tensor: torch.Tensor) -> bool:
        return self.stays and tensor.data_ptr() != self._address


def _attends(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "name", str)() == _ATTEND


def _numbered(graph: torch.fx.GraphModule) -> Callable[[torch.fx.Node], int]:
    """In which part of the step each node is; every attention is one by itself."""
    parts: dict[torch.fx.Node, int] = {}
    part = 0
    for node in graph.graph.nodes:
        part += _attends(node)
        parts[node] = part
        part += _attends(node)
    return parts.__getitem__
