"""Inductor at work: what it is told, and where it keeps what it compiled."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.torch_compile import TorchCompilation
from jackfield_plugins.native.compiling import CACHE, compiler

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"

_environment = threading.Lock()


class InductorCompilation(TorchCompilation):
    """Each graph is handed to the torch compiler that the options name."""

    name = "inductor"

    def __init__(self, options: Any, model: str) -> None:
        source = f"torch {torch.__version__}, {options.backend}"
        bucketed = options.shapes == "bucketed"
        super().__init__(model, source, bucketed=bucketed, prefill=options.prefill)
        self._options = options

    def lower(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        options = self._options
        lower: Any = torch._dynamo.lookup_backend(options.backend)
        if options.backend == "inductor":
            with _cache_folder():
                compiled = lower(graph, inputs, config_patches=_patches(options.mode))
        else:
            compiled = lower(graph, inputs)
        self.count()
        return compiled  # type: ignore[no-any-return]


def _patches(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode, and the C++ compiler that is there."""
    from torch._inductor import list_mode_options

    found = compiler()
    cxx = {"cpp.cxx": (None, shlex.join(found))} if found else {}
    return {**list_mode_options(mode), **cxx}


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
