"""Recordings of what a GPU is told to do."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: Held while a GPU records: what another thread told it meanwhile could end up in no recording.
_recording = threading.Lock()


class Recorder(Protocol):
    """Records what a function has a device do."""

    source: str

    @property
    def num_bytes(self) -> int:
        """What recordings take there now."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `run` returns, and what fills it anew from the tensors that `run` reads.

        `run` must change nothing but what it returns. What that holds is undefined until the first
        call of the second.
        """


class CudaGraphs:
    """CUDA graphs that share one pool of memory: one is played at a time, and results are kept.

    What a recording needs in between may lie where another one's does; what it returns lies there
    alone for as long as somebody holds it.
    """

    source = f"torch {torch.__version__}, CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._pools: set[Any] = set()  # those that recordings may lie in
        self._stream: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # that lie in the pool

    @property
    def num_bytes(self) -> int:
        """What torch holds for these pools; less once recordings are dropped and it is freed."""
        if not self._pools:
            return 0
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["segment_pool_id"] in self._pools
        )

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with _recording, torch.cuda.device(self._device):
            if not self._graphs:  # torch takes no pool again whose last graph is gone
                self._pool = torch.cuda.graph_pool_handle()
                self._pools.add(self._pool)
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            # A stream is recorded, and the default one cannot be.
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    run()  # what libraries set up at their first call cannot be recorded
                    self._stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    outputs = self._capture(graph, run)
            except BaseException:
                # They may be left as in the middle of a recording. Others that lie in the pool
                # go on to hold it.
                self._pool = self._stream = None
                self._graphs.clear()
                raise
            self._graphs.add(graph)
            torch.cuda.current_stream().wait_stream(self._stream)
        return outputs, graph.replay

    def _capture(self, graph: Any, run: Callable[[], Any]) -> Any:
        # `torch.cuda.graph` also collects garbage, which takes longer than a recording.
        # With the first graph of a process torch makes tensors for its random numbers. It writes to
        # them when anybody begins another one, who may not where these are of inference mode.
        with torch.inference_mode(False):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # says only that the recording is broken
                graph.capture_end()
            raise
        graph.capture_end()
        return outputs
