"""Decode steps that are recorded whole, the attention included, and played.

A step that lies at a fixed place (`FixedStep`) is the same work at the same addresses each time, so
nothing of it has to be told to the device again. Its attention is called when it is recorded, which
is where the calls are noted, and counted with each step that is played.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from jackfield.bridge.opaque import OpaqueStep, within
from jackfield.errors import ExecutionError, JackfieldError, PluginError
from jackfield.guarded import fault, guarded

if TYPE_CHECKING:
    from torch import nn

    from jackfield.bridge.attention import AttentionBinding
    from jackfield.contracts import Compilation, FixedStep, KVCache
    from jackfield.contracts.compiling import ModelStep
    from jackfield.registry.backends import Registered

logger = logging.getLogger("jackfield")


class RecordedSteps:
    """The steps of one model that were recorded whole, by how many rows they have.

    `played` counts steps, `sizes` are the rows that are recorded now; `given_up` says why larger
    ones, or all, are not: a size that cannot be recorded goes through the compiled step from then
    on, and nothing of it is kept.
    """

    def __init__(
        self,
        compilation: Compilation,
        registered: Registered,
        step: ModelStep,
        modules: Mapping[int, nn.Module],
    ) -> None:
        self.played = 0
        self.sizes: tuple[int, ...] = ()
        self.given_up: str | None = None
        self._compilation = compilation
        self._registered = registered
        self._guard = guarded(registered, "its recorded step")
        self._modules = modules
        self._calls: dict[int, list[int]] = {}  # the layers that a size's recording calls
        self._attention: AttentionBinding
        self._cache: KVCache
        with guarded(registered, "record"):
            self._run = compilation.record(step)
        if self._run is step or not callable(self._run):
            raise fault(registered, "record must return a recorded step")

    @torch.inference_mode()
    def record(self, cache: KVCache, attention: AttentionBinding, most: int) -> None:
        """Record steps of up to `most` sequences, before the first one comes."""
        self._cache, self._attention = cache, attention
        with guarded(self._registered, "sizes"):
            sizes = self._compilation.sizes(most)
        for rows in sizes:
            try:
                self.logits(cache.fix(rows))
            except (ExecutionError, PluginError) as error:
                self._give_up(rows, error)
                break
            self.sizes += (rows,)
        cache.forget()
        self.played = 0

    def __call__(
        self, fixed: FixedStep, otherwise: Callable[[FixedStep], torch.Tensor]
    ) -> torch.Tensor:
        """Logits `[1, rows, vocab]` of a step; by `otherwise` where it cannot be recorded any more.

        A step may be computed several times: it writes the same to the same places.
        """
        try:
            found = self.logits(fixed)
        except ExecutionError as error:
            self._give_up(fixed.rows, error)
            return otherwise(fixed)
        self._attention.played(self._calls[fixed.rows])
        self.played += 1
        return found

    def logits(self, fixed: FixedStep) -> torch.Tensor:
        """The same, or an ExecutionError. Records where that was not done."""
        rows, attention = fixed.rows, self._attention
        assert attention.forward is not None
        step = OpaqueStep(attention.forward, self._modules, 1, rows)
        with within(step), self._guard, attention.recording() as calls:
            logits = self._run(fixed.input_ids, fixed.position_ids, None)
        if calls:
            self._calls[rows] = calls
        if set(self._calls.get(rows, ())) != attention.expected:
            raise fault(self._registered, f"played a step of {rows} rows that it never recorded")
        if logits.shape[:2] != (1, rows):
            raise fault(
                self._registered, f"must return logits [1, {rows}, vocab], got {list(logits.shape)}"
            )
        return logits

    def _give_up(self, rows: int, error: JackfieldError) -> None:
        self._cache.loosen(rows)
        self._calls.pop(rows, None)
        self.sizes = tuple(size for size in self.sizes if size != rows)
        self.given_up = f"{rows} rows are recorded between attentions: {error}"
        logger.warning("steps of %s", self.given_up)

    def close(self) -> None:
        """Let go of the recordings."""
        del self._run, self._cache
