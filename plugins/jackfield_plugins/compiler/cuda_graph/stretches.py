"""A traced step, cut at its attentions into stretches that are recorded, or recorded whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.passes.split_module import split_module

from jackfield.contracts import in_units
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.cuda_graph.whole import Recording, Whole
from jackfield_plugins.compiler.inductor_lowering import fused
from jackfield_plugins.compiler.torch_compile import TorchCompilation

if TYPE_CHECKING:
    from jackfield.contracts.compiling import ModelStep
    from jackfield_plugins.compiler.cuda_graph.graphs import Recorder

_ATTEND = "jackfield::attend"

#: `Recorder.record`.
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


#: The largest step that is recorded whole. Larger ones keep a GPU busy for longer than it takes
#: to launch what lies between two attentions.
MOST_ROWS = 64

#: No more whole steps are recorded once these take so many bytes, beside what they return.
MOST_BYTES = 1 << 30


class RecordedCompilation(TorchCompilation):
    """Each shape is recorded when its first step runs, and again where what it read has moved."""

    name = "cuda_graph"

    def __init__(self, model: str, recorder: Recorder, *, fuse: bool) -> None:
        super().__init__(model, recorder.source, bucketed=True)
        self._recorder = recorder
        self._fuse = fuse
        self._made: list[Whole] = []
        self._last: Recording | None = None  # that was played
        #: By where a step lies, what plays it and what that fills, of a model that was looked at.
        self._known: dict[tuple[int, ...], tuple[Callable[[], None], Any]] = {}

    @property
    def num_bytes(self) -> int:
        return self._recorder.num_bytes

    def sizes(self, most: int) -> list[int]:
        """Powers of two, up to where all of `most` have room."""
        return [1 << n for n in range(self.fill(min(most, MOST_ROWS)).bit_length())]

    def record(self, step: ModelStep) -> ModelStep:
        # Tracing takes seconds; one graph is recorded for all sizes but one.
        checked = self._compiled(step, self._lower_whole, bucketed=False)
        known = self._known

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            """By `checked`, which looks at the whole model, once for each request that comes."""
            if self.anew:
                self.anew = False  # before it is looked at: what comes meanwhile is looked at again
                known.clear()
            place = ids.data_ptr(), positions.data_ptr(), ids.shape[1]
            if (there := known.get(place)) is not None:
                play, found = there
                play()
                return found
            self._last = None
            found = checked(ids, positions, keep)
            if self._last is not None:
                known[place] = self._last.play, found
                self._last = None
            return found

        return run

    def _lower_whole(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        if self._fuse:
            self.source = f"{self._recorder.source}, fused by inductor"
            return self._recorded_whole(fused(graph, inputs), inputs)
        return aot_autograd(fw_compiler=self._recorded_whole)(graph, inputs)

    def _recorded_whole(self, run: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
        self._made.append(Whole(run, self._record_whole, inputs))
        return self._counting(self._made[-1])

    def close(self) -> None:
        self._known.clear()
        self._last = None
        for made in self._made:
            made.close()

    def _record_whole(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if (taken := self._recorder.num_bytes) > MOST_BYTES:
            raise ExecutionError(
                f"{self.name} records no more whole steps: recordings take {in_units(taken)}, of "
                f"{in_units(MOST_BYTES)} that they may"
            )
        return self._record(run)

    def lower(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        # What it makes of a graph changes no tensor that it is given, so a stretch can be repeated.
        return aot_autograd(fw_compiler=self._recorded)(graph, inputs)

    def _recorded(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        del inputs
        return self._counting(Stretches(graph, self._record))

    def _counting(self, made: Stretches | Whole) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found = made(*inputs)
            self._last = getattr(made, "last", None)
            if made.recorded:
                made.recorded = False
                self.count()
            return found

        return run

    def _record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        try:
            return self._recorder.record(run)
        except RuntimeError as error:  # torch's word for all that a GPU cannot do
            raise ExecutionError(self.complaint(error)) from error


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
