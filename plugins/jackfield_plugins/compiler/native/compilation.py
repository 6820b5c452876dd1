"""Programs of one model, by the size of their steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import Compilation
from jackfield.errors import ExecutionError, first_line
from jackfield_plugins.compiler.holding import Held
from jackfield_plugins.compiler.native.between import Size, between, evidence
from jackfield_plugins.compiler.native.graph import Graph
from jackfield_plugins.compiler.native.kept import KeptGraphs
from jackfield_plugins.compiler.native.linears import KERNEL, few
from jackfield_plugins.compiler.native.program import Program, StaleError
from jackfield_plugins.compiler.native.tracing import trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.contracts.compiling import ModelStep


class NativeCompilation(Compilation):
    """One program for each size of a step, filled up as `fill` says.

    A graph is traced, or read from disk, when a size first comes; the program that it is laid out
    to reads weights where they lie. Both are looked at when a request comes, and in parts in each
    step, and made again where they no longer hold.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._held: Held | None = None
        self._kept: KeptGraphs | None = None
        self._graphs: dict[Size, Graph] = {}
        self._programs: dict[Size, Program] = {}

    @property
    def source(self) -> str:  # type: ignore[override]
        """The compiler of the kernel, and for what a step goes back to Python."""
        programs = list(self._programs.values())
        missing = sorted({name for p in programs for name in p.python})
        if some := sum(program.attended_in_python for program in programs):
            every = sum(program.steps for program in programs)
            missing.append(f"the attention of {some} of {every} steps that decode")
        return KERNEL.built_with() + (f"; in Python: {', '.join(missing)}" if missing else "")

    @property
    def num_bytes(self) -> int:
        """What lies between the weights and the logits of all sizes."""
        return sum(program.num_bytes for program in list(self._programs.values()))

    def fill(self, count: int) -> int:
        """The next power of two; beyond 16, where each row costs, a multiple of 8, and of an eighth
        of the next power of two."""
        power = 1 << (count - 1).bit_length()
        step = max(8, power // 8) if power > 16 else power
        return -(-count // step) * step

    @property
    def reads_up_to(self) -> int:  # type: ignore[override]
        return few(self._model.dtype)

    def reads(self, rows: int, width: int) -> bool:
        """Few tokens in one row, where a graph of as many is there: nobody waits for a trace."""
        if rows != 1 or width > self.reads_up_to:
            return False
        self._look()
        return self._read((rows, width))[0] is not None

    def compile(self, step: ModelStep) -> ModelStep:
        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            self._look()
            size = (ids.shape[0], ids.shape[1])
            program = self._programs.get(size) or self._made(step, size)
            return program(ids, positions, keep)

        return run

    def ahead(self, step: ModelStep, sizes: Sequence[Size]) -> None:
        self._look()
        missing = [size for size in sizes if self._read(size)[0] is None]
        for size in evidence(missing):
            # Mixtures have no steps of some odd sizes. What a size of `sizes` lacks is told below.
            with contextlib.suppress(ExecutionError):
                self._graph(step, size)
        for size in sizes:
            if size not in self._programs:
                self._made(step, size)

    def close(self) -> None:
        """Let go of what was laid out."""
        self._programs.clear()
        self._graphs.clear()
        self._held = None

    def _look(self) -> None:
        """Forget what does not hold any more."""
        held, anew = self._held, self.anew
        self.anew = False  # before it is looked at: what comes meanwhile is looked at again
        if held is not None and not anew and held.next_is_same():
            return
        if held is not None and held.is_structure():
            if held.is_place():
                return
        else:
            self._graphs.clear()
            self._kept = None
        self._programs.clear()
        self._held = Held(self._model)

    def _made(self, step: Callable[..., Any], size: Size) -> Program:
        began = time.perf_counter()
        try:
            program = Program(self._graph(step, size), self._weight, self.offers)
        except StaleError:  # numbers of another shape or dtype lie in the place of the old ones
            self._graphs.clear()
            self._kept = None
            program = Program(self._graph(step, size), self._weight, self.offers)
        self._programs[size] = program
        self.seconds += time.perf_counter() - began
        return program

    def _graph(self, step: Callable[..., Any], size: Size) -> Graph:
        found, kept = self._read(size)
        if found is None:
            if (replaced := kept.replaced) is not None:
                raise ExecutionError(
                    f"native cannot trace {type(self._model).__name__}: {replaced} is not torch's "
                    "own, and a trace holds what torch has; put it back, or load it without compile"
                )
            found = between(self._graphs, size) or self._traced(step, size)
            self._graphs[size] = found
            self.kept += kept.keep(found)
            self.graphs += 1
        return found

    def _read(self, size: Size) -> tuple[Graph | None, KeptGraphs]:
        """The graph of a step of this size, if one is here or on disk, and what is on disk."""
        self._kept = self._kept or KeptGraphs(self._model)
        found = self._graphs.get(size)
        if found is None and (found := self._kept.read(*size)) is not None:
            self._graphs[size] = found
            self.kept += 1
            self.graphs += 1
        return found, self._kept

    def _traced(self, step: Callable[..., Any], size: Size) -> Graph:
        try:
            return trace(step, self._model, *size)
        except ExecutionError:
            raise
        except Exception as error:  # whatever a model's own code raises, or torch says of it
            raise ExecutionError(
                f"native cannot trace {type(self._model).__name__}: {first_line(error)}; load it "
                "without compile"
            ) from error

    def _weight(self, name: str) -> torch.Tensor:
        at, _, last = name.rpartition(".")
        found = getattr(self._model.get_submodule(at), last)
        assert isinstance(found, torch.Tensor)
        return found
