"""Inductor at work, and what it is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jackfield_plugins.compiler.inductor_cache import cache_folder
from jackfield_plugins.compiler.torch_compile import TorchCompilation
from jackfield_plugins.native.compiling import compiler

if TYPE_CHECKING:
    from torch import nn


class InductorCompilation(TorchCompilation):
    """Each graph is handed to the torch compiler that the options name."""

    name = "inductor"

    def __init__(self, options: Any, model: nn.Module) -> None:
        source = f"torch {torch.__version__}, {options.backend}"
        bucketed = options.shapes == "bucketed"
        super().__init__(model, source, bucketed=bucketed, prefill=options.prefill)
        self._options = options

    def lower(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        options = self._options
        if options.backend == "inductor":
            compiled = fused(graph, inputs, options.mode)
        else:
            compiled = torch._dynamo.lookup_backend(options.backend)(graph, inputs)
        self.count()
        return compiled


def fused(graph: Any, inputs: Any, mode: str = "default") -> Callable[..., Any]:
    """What inductor makes of a graph that torch traced, given an example of its inputs.

    Raises ExecutionError where what it compiles cannot be kept.
    """
    lower: Any = torch._dynamo.lookup_backend("inductor")
    with cache_folder():
        return lower(graph, inputs, config_patches=_patches(mode))  # type: ignore[no-any-return]


def _patches(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode, and the C++ compiler that is there."""
    from torch._inductor import list_mode_options

    found = compiler()
    cxx = {"cpp.cxx": (None, shlex.join(found))} if found else {}
    return {**list_mode_options(mode), **cxx}
