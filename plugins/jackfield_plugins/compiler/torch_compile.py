"""`torch.compile` with what an engine needs beside it: counts, a cache of its own, plain errors."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import stat
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import Compilation
from jackfield.errors import ExecutionError
from jackfield_plugins.native.compiling import CACHE, compiler

if TYPE_CHECKING:
    from jackfield.contracts.compiling import ModelStep

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"

_PARTICULARS = ("Developer debug context:", "Caused by:")  # how torch begins the line with them
_environment = threading.Lock()


class TorchCompilation(Compilation):
    """One function of `torch.compile` for each shape, so that each is one graph.

    torch keeps graphs by code object and runs what exceeds a limit uncompiled; a code object for
    each function leaves every engine and every shape its own.
    """

    def __init__(self, options: Any, model: str) -> None:
        self.prefill = options.prefill
        self.source = f"torch {torch.__version__}, {options.backend}"
        self._options = options
        self._model = model
        self._began: float | None = None
        self._collects = False

    def fill(self, count: int) -> int:
        """The next power of two, where shapes are bucketed."""
        return 1 << (count - 1).bit_length() if self._options.shapes == "bucketed" else count

    def compile(self, step: ModelStep) -> ModelStep:
        compiled: dict[tuple[int | None, ...], ModelStep] = {}

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> Any:
            shape = (*map(self._size, ids.shape), None if keep is None else self._size(len(keep)))
            if shape not in compiled:
                compiled[shape] = self._of_one_shape(step)
                self._mark(ids, positions, keep)
            self._began = time.perf_counter()
            self._collects = gc.isenabled()
            try:
                with _collecting(False):
                    return compiled[shape](ids, positions, keep)
            except ExecutionError:
                raise
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch._dynamo.exc.FailOnRecompileLimitHit,
            ) as error:
                inner = getattr(error, "inner_exception", error)
                if isinstance(inner, ExecutionError):
                    raise inner from None
                raise ExecutionError(self._complaint(error)) from error

        return run

    def _size(self, count: int) -> int:
        """What a size means to a graph: one is always special; else only which it is, if at all."""
        return count if self._options.shapes == "bucketed" else min(count, 2)

    def _mark(self, *tensors: torch.Tensor | None) -> None:
        """Let a graph hold for any size but one; `dynamic=True` would free other numbers, too."""
        if self._options.shapes == "dynamic":
            for tensor in tensors:
                for at, size in enumerate(() if tensor is None else tensor.shape):
                    if size > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, at)

    def _of_one_shape(self, step: ModelStep) -> ModelStep:
        own = types.FunctionType(
            step.__code__.replace(),
            step.__globals__,
            step.__name__,
            None,
            step.__closure__,
        )
        return torch.compile(
            own,
            backend=self._lower,
            fullgraph=True,
            options={"guard_filter_fn": _without_tables},
        )

    def _lower(self, graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
        """The compiler that torch calls with each graph that it traced."""
        options = self._options
        lower: Any = torch._dynamo.lookup_backend(options.backend)
        with _collecting(self._collects):  # it can take minutes, and leaves much behind
            if options.backend == "inductor":
                with _cache_folder():
                    compiled = lower(graph, inputs, config_patches=_patches(options.mode))
            else:
                compiled = lower(graph, inputs)
        self.graphs += 1
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
        return compiled  # type: ignore[no-any-return]

    def _complaint(self, error: BaseException) -> str:
        return f"inductor cannot compile {self._model}: {_cause(error)}; load it without compile"


def _cause(error: BaseException) -> str:
    """One line of what torch tells in many: what it met, and where it says so, in which form."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    for begin in _PARTICULARS:
        for line in lines[1:]:
            if line.startswith(begin):
                return f"{first} ({line.removeprefix(begin).strip()})"
    errors = (line for line in lines[1:] if " error: " in line)  # of the C++ compiler
    return " ".join((first, *list(errors)[:1]))


def _patches(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode, and the C++ compiler that is there."""
    from torch._inductor import list_mode_options

    found = compiler()
    cxx = {"cpp.cxx": (None, shlex.join(found))} if found else {}
    return {**list_mode_options(mode), **cxx}


def _without_tables(guards: Sequence[Any]) -> list[bool]:
    """All of torch's guards but those on the keys of transformers' tables of attentions.

    An engine that is loaded or closed elsewhere changes them; our own entry stays guarded.
    """
    return [not guard.name.endswith("['_global_mapping']") for guard in guards]


@contextlib.contextmanager
def _collecting(on: bool) -> Iterator[None]:
    """Have the garbage collector on, or off; nothing happens where it is so already.

    Between a call of what is compiled and its first operation torch takes every function that
    starts in this thread for a part of it. So it would trace the finalizers that the collector
    runs there: they would count as graphs, or fail and leave undone what they are for.
    """
    if gc.isenabled() == on:
        yield
        return
    switch = (gc.disable, gc.enable)
    switch[on]()
    try:
        yield
    finally:
        switch[not on]()


@contextlib.contextmanager
def _cache_folder() -> Iterator[None]:
    """Have inductor keep what it compiles in jackfield's folder, unless it was told where.

    Torch sets the variable itself, to a folder under /tmp, when it first looks for it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with _environment:
        before = os.environ.get(CACHE_DIR)
        if before in (None, "", default_cache_dir()):
            os.environ[CACHE_DIR] = str(_folder())
        try:
            yield
        finally:
            os.environ.pop(CACHE_DIR, None)
            if before is not None:
                os.environ[CACHE_DIR] = before


def _folder() -> Path:
    """Where compiled steps stay. torch unpickles them, so nobody else may write there."""
    try:
        path = Path(os.environ.get(CACHE) or Path.home() / ".cache") / "jackfield" / "inductor"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (OSError, RuntimeError) as error:
        raise ExecutionError(
            f"inductor cannot keep what it compiles ({error}); set {CACHE} to a folder that can be "
            "written"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ExecutionError(
            f"others can write to {path}, from which compiled code is loaded; make it yours alone "
            f"(chmod 700), or set {CACHE} to another folder"
        )
    return path
