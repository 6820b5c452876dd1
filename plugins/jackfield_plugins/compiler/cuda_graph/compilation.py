"""What is recorded of a model's decode steps, when, and whether it holds still."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._dynamo.backends.common import aot_autograd

from jackfield.contracts import in_units
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.cuda_graph.stretches import Stretches
from jackfield_plugins.compiler.cuda_graph.whole import AGAIN, Recording, Whole
from jackfield_plugins.compiler.inductor_lowering import fused
from jackfield_plugins.compiler.torch_compile import TorchCompilation

if TYPE_CHECKING:
    import torch
    from torch import nn

    from jackfield.contracts.compiling import ModelStep
    from jackfield_plugins.compiler.cuda_graph import CudaGraphOptions
    from jackfield_plugins.compiler.cuda_graph.graphs import Recorder

#: The largest step that is recorded whole. Larger ones keep a GPU busy for longer than it takes
#: to launch them.
MOST_ROWS = 64

#: No more whole steps are recorded once these take so many bytes, beside what they return.
MOST_BYTES = 1 << 30


class RecordedCompilation(TorchCompilation):
    """Each shape is recorded when its first step runs, and again where what it read has moved."""

    name = "cuda_graph"
    closely = True

    def __init__(self, model: nn.Module, recorder: Recorder, options: CudaGraphOptions) -> None:
        super().__init__(model, recorder.source, bucketed=True)
        self._recorder = recorder
        self._options = options
        self._changes = 0  # that were found whenever somebody looked, one after the other
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

    def decodes(self) -> bool:
        return self._options.record != "whole"

    def not_played(self) -> str | None:
        """Hooks, which a recording would not call; or that the model always changes.

        Forgets what does not hold any more.
        """
        changes = self._changes
        self._look()
        if self._changes == changes:
            self._changes = 0
        assert self._held is not None
        if self._held.is_hooked:
            return "the model has hooks, which a recording would not call"
        return "the model changes in every step" if self._changes > AGAIN else None

    def record(self, step: ModelStep) -> ModelStep:
        checked = self._traced(step) if self._options.fuse else self._as_it_is(step)
        known = self._known

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            place = ids.data_ptr(), positions.data_ptr(), ids.shape[1]
            if (there := known.get(place)) is not None:
                play, found = there
                play()
                return found
            found = checked(ids, positions, keep)
            if self._last is not None:
                known[place] = self._last.play, found
                self._last = None
            return found

        return run

    def _moved(self) -> None:
        self._changes += 1
        self.forget()

    def _as_it_is(self, step: ModelStep) -> ModelStep:
        """`step`, recorded as the model's code has it."""

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            inputs = (ids, positions, ids.shape[1])
            if not self._made:
                whole = Whole(lambda ids, at, _: step(ids, at, None), self._record_whole, inputs)
                self._made.append(whole)
            self._began = time.perf_counter()
            return self._counting(self._made[-1])(*inputs)

        return run

    def _traced(self, step: ModelStep) -> ModelStep:
        """`step`, written anew by inductor before it is recorded."""
        self.source = f"{self._recorder.source}, fused by inductor"
        # Tracing takes seconds; one graph is recorded for all sizes but one.
        return self._compiled(step, self._lower_whole, bucketed=False)

    def _lower_whole(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self._made.append(Whole(fused(graph, inputs), self._record_whole, inputs))
        return self._counting(self._made[-1])

    def forget(self) -> None:
        self._known.clear()
        self._last = None
        for made in self._made:
            made.close()

    def close(self) -> None:
        self.forget()
        super().close()

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
            self._last = made.last if isinstance(made, Whole) else None
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
