"""Decode steps that are recorded whole, the attention included, and played.

A step that lies at a fixed place (`FixedStep`) is the same work at the same addresses each time, so
nothing of it has to be told to the device again. Its attention is called when it is recorded, which
is where the calls are noted, and counted with each step that is played. Each size is held to the
same steps run eagerly before the first request comes (`step_trial.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jackfield.bridge.opaque import OpaqueStep, within
from jackfield.bridge.step_trial import StepTrial, bound_of, distance
from jackfield.errors import ExecutionError, PluginError, first_line
from jackfield.guarded import fault, guarded

if TYPE_CHECKING:
    from torch import nn

    from jackfield.bridge.attention import AttentionBinding
    from jackfield.bridge.layers import Layers
    from jackfield.contracts import Compilation, FixedStep, KVCache, ModelInputs
    from jackfield.contracts.compiling import ModelStep
    from jackfield.registry.backends import Registered

logger = logging.getLogger("jackfield")


class _Calls(NamedTuple):
    """What a recorded step calls: the layers of the attention, how often each kernel."""

    attention: list[int]
    kernels: list[int]


class RecordedSteps:
    """The steps of one model that were recorded whole, by how many rows they have.

    `played` counts steps, `sizes` are the rows that are recorded now; `given_up` says why larger
    ones, or all, are not: steps of a size that cannot be recorded run as all others do from then
    on, and nothing of it is kept. `paused` says why none is played now.
    """

    def __init__(
        self,
        compilation: Compilation,
        registered: Registered,
        step: ModelStep,
        modules: Mapping[int, nn.Module],
        layers: Seq[Layers],
        *,
        traced: bool,
    ) -> None:
        self.played = 0
        self.sizes: tuple[int, ...] = ()
        self.given_up: str | None = None
        self.paused: str | None = None
        self._compilation = compilation
        self._registered = registered
        self._guard = guarded(registered, "its recorded step")
        self._modules = modules
        self._layers = layers
        self._traced = traced
        self._calls: dict[int, _Calls] = {}  # what a size's recording calls
        self._attention: AttentionBinding
        self._cache: KVCache
        with guarded(registered, "record"):
            self._run = compilation.record(self._noting(step) if layers else step)
        if self._run is step or not callable(self._run):
            raise fault(registered, "record must return a recorded step")

    @torch.inference_mode()
    def record(
        self,
        cache: KVCache,
        attention: AttentionBinding,
        most: int,
        trial: StepTrial,
        backends: Seq[Registered],
        *,
        named: bool,
    ) -> None:
        """Record steps of up to `most` sequences, before the first one comes.

        `backends` are the attention, the cache, the compiler and the kernels. Raises PluginError
        where a recorded step says something else than an eager one; it names those that are not
        jackfield's own, or all. Where nobody `named` the compiler, that is a warning, and none is
        recorded.
        Where somebody did, and nothing is recorded nor compiled, raises ExecutionError.
        """
        self._cache, self._attention = cache, attention
        with guarded(self._registered, "sizes"):
            sizes = self._compilation.sizes(most)
        if self.plays():
            try:
                for rows in sizes:
                    if not self._tried(rows, most, trial, backends):
                        break
            except PluginError as error:
                if named:
                    raise
                for rows in self.sizes:
                    cache.loosen(rows)
                self._give_all_up(error)
        else:
            self._give_all_up(self.paused)
        cache.forget()
        self.played = 0
        if named and not self.sizes and not self._compiles():
            raise ExecutionError(f"{self._registered}: {self.given_up}; load it without compile")

    def plays(self) -> bool:
        """Whether steps that were recorded are played now. A warning says why they are not."""
        with self._guard:
            why = self._compilation.not_played()
        if why != self.paused and why is not None and self.sizes:
            logger.warning("steps are not played from recordings now: %s", why)
        self.paused = why
        return why is None

    def _compiles(self) -> bool:
        """Whether decode steps that are not played are compiled."""
        with self._guard:
            return bool(self._compilation.decodes())

    def _tried(self, rows: int, most: int, trial: StepTrial, backends: Seq[Registered]) -> bool:
        """Record steps of so many rows; whether that can be done."""
        fixed, cache = None, self._cache
        try:
            with self._attention.recording(), self._recording():  # nobody asked for these calls
                texts, due, noise = trial.eagerly(rows, most)
                fixed = cache.fix(rows)
                self.sizes += (rows,)
                self._record(fixed, backends)
                found = trial.decode(texts, rows, self._played)
        except (ExecutionError, RuntimeError, MemoryError) as error:  # torch's, mostly of memory
            if fixed is not None:
                cache.loosen(rows)
            self._give_up(rows, first_line(error))
            return False
        bound = bound_of(due[0].dtype, noise, traced=self._traced)
        _compare(rows, found, due, bound, backends)
        return True

    def _record(self, fixed: FixedStep, backends: Seq[Registered]) -> None:
        """Record a size. What a backend raises meanwhile is no more than that this cannot be."""
        read = HostReads()
        try:
            with read.of(fixed):
                self.logits(fixed)
        except (ExecutionError, PluginError) as error:
            read.check(backends[:2])
            raise ExecutionError(first_line(error)) from error
        read.check(backends[:2])

    def _played(self, inputs: ModelInputs) -> torch.Tensor:
        """The logits `[sequences, 1, vocab]` of a step of the trial, played."""
        if inputs.fixed is None:
            raise fault(self._cache, "prepare lays a step out elsewhere that has room in its place")
        return self.logits(inputs.fixed)[0, : inputs.rows, None]

    def __call__(
        self, inputs: ModelInputs, otherwise: Callable[[ModelInputs], torch.Tensor]
    ) -> torch.Tensor:
        """Logits `[sequences, 1, vocab]` of a step at a fixed place.

        By `otherwise` where it cannot be recorded any more.

        A step may be computed several times: it writes the same to the same places.
        """
        fixed = inputs.fixed
        assert fixed is not None
        try:
            found = self.logits(fixed)
        except ExecutionError as error:
            self._cache.loosen(fixed.rows)
            self._give_up(fixed.rows, error)
            return otherwise(inputs)
        calls = self._calls[fixed.rows]
        self._attention.played(calls.attention)
        for layers, count in zip(self._layers, calls.kernels, strict=True):
            layers.played(count)
        self.played += 1
        return found[0, : inputs.rows, None]

    def logits(self, fixed: FixedStep) -> torch.Tensor:
        """The same, or an ExecutionError. Records where that was not done."""
        rows, attention = fixed.rows, self._attention
        assert attention.forward is not None
        step = OpaqueStep(attention.forward, self._modules, 1, rows, run_as_it_is=True)
        with within(step), self._guard, self._recording() as kernels, attention.recording() as own:
            logits = self._run(fixed.input_ids, fixed.position_ids, None)
        if own:
            self._calls[rows] = _Calls(own, list(map(len, kernels)))
        known = self._calls.get(rows)
        if known is None or set(known.attention) != attention.expected:
            raise fault(self._registered, f"played a step of {rows} rows that it never recorded")
        if logits.shape[:2] != (1, rows):
            raise fault(
                self._registered, f"must return logits [1, {rows}, vocab], got {list(logits.shape)}"
            )
        return logits

    @contextlib.contextmanager
    def _recording(self) -> Iterator[list[list[nn.Module]]]:
        """Calls of kernels are noted and not counted; yields those of each kernel."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(layers.recording()) for layers in self._layers]

    def _noting(self, step: ModelStep) -> ModelStep:
        """`step`, of which it is told when it begins: a recording may run it several times."""

        def run(
            ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
        ) -> torch.Tensor:
            for layers in self._layers:
                layers.again()
            return step(ids, positions, keep)

        return run

    def _give_all_up(self, why: object) -> None:
        self.sizes = ()
        self.given_up = f"none is recorded whole: {why}"
        logger.warning("of the decode steps %s", self.given_up)
        with self._guard:
            self._compilation.forget()

    def _give_up(self, rows: int, error: object) -> None:
        self._calls.pop(rows, None)
        self.sizes = tuple(size for size in self.sizes if size != rows)
        self.given_up = f"{rows} rows are not recorded whole: {error}"
        logger.warning("steps of %s", self.given_up)

    def close(self) -> None:
        """Let go of the recordings."""
        del self._run, self._cache


class HostReads:
    """What is read on the host of a step that is being recorded, though it changes with each."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    @contextlib.contextmanager
    def of(self, fixed: FixedStep) -> Iterator[None]:
        """Note what is read of `fixed` meanwhile."""
        before = [(tables, name, getattr(tables, name)) for tables in fixed.tables for name in HOST]
        for tables, name, _ in before:
            setattr(tables, name, _Noted(name, self._noted))
        try:
            yield
        finally:
            for tables, name, numbers in before:
                setattr(tables, name, numbers)

    def check(self, backends: Seq[Registered]) -> None:
        """Raise PluginError where something was."""
        if self._noted:
            raise fault(
                _blamed(backends),
                f"reads {', '.join(sorted(self._noted))} of the PageTables on the host while a "
                "step is recorded, which stays what it was then; read block_table and first, or do "
                "not declare recordable",
            )


#: What `PageTables` has on the host of the step that is prepared.
HOST = ("tables", "firsts", "in_a_row", "runs")


class _Noted(list[Any]):
    """An empty list. That somebody looks is noted under its name."""

    def __init__(self, name: str, noted: set[str]) -> None:
        super().__init__()
        self._name = name
        self._noted = noted

    def __len__(self) -> int:
        self._noted.add(self._name)
        return 0

    def __iter__(self) -> Iterator[Any]:
        self._noted.add(self._name)
        return iter(())

    def __getitem__(self, at: Any) -> Any:
        self._noted.add(self._name)
        return super().__getitem__(at)


def _compare(
    rows: int,
    found: Seq[torch.Tensor],
    due: Seq[torch.Tensor],
    bound: float,
    backends: Seq[Registered],
) -> None:
    for at, (mine, other) in enumerate(zip(found, due, strict=True)):
        off = distance(mine, other)
        if not off <= bound:
            raise fault(
                _blamed(backends),
                f"a recorded step of {rows} rows says something else than the same step run "
                f"eagerly{', once lengths have changed' if at else ''}: its logits are off by "
                f"{off:.2g} of their spread, at most {bound:.2g} is due; what is recorded must "
                "read and write on the device, at the same addresses in each step, or not "
                "declare recordable",
            )


def _blamed(backends: Seq[Registered]) -> str:
    """Those that tests do not hold to their contracts; all where they hold all."""
    return " and ".join(str(one) for one in backends if not one.own) or " and ".join(
        map(str, backends)
    )
