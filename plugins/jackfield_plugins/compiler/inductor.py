"""``inductor``: `torch.compile`, which writes a step's operations anew and compiles them."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Requirements
from jackfield_plugins.compiler.inductor_cache import cannot_keep
from jackfield_plugins.compiler.tracing import cannot_trace
from jackfield_plugins.native.compiling import compiler

if TYPE_CHECKING:
    from jackfield.contracts import Compilation


@dataclass(frozen=True)
class InductorOptions:
    """What is compiled, and for which sizes.

    `shapes`: "dynamic" compiles once for one token and once for any number of them; "bucketed"
    once for each power of two, up to which steps are filled. `prefill`: steps that read prompts are
    compiled as well. `mode` is torch's. `backend`: which of torch's compilers takes the traced
    step; "eager" and "aot_eager" run it as it is, which shows where a fault comes from.
    """

    shapes: Literal["dynamic", "bucketed"] = "dynamic"
    prefill: bool = False
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"

    def __post_init__(self) -> None:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode is inductor's, and backend={self.backend} has none; drop it")


class InductorCompiler(Compiler):
    """After PyTorch 2 (Ansel et al., ASPLOS 2024, doi:10.1145/3620665.3640366)."""

    name = "inductor"
    options = InductorOptions
    capabilities = CompilerCapabilities(devices=frozenset({"cpu"}))  # tested on no other

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if options.backend == "inductor":
            reasons += _cannot_build() or cannot_keep()
        return reasons or cannot_trace()

    def bind(self, context: BindContext) -> Compilation:
        from jackfield_plugins.compiler.inductor_lowering import InductorCompilation

        assert context.model is not None
        return InductorCompilation(context.options, context.model)


def _cannot_build() -> list[str]:
    """Why what inductor writes cannot be compiled on this machine."""
    if compiler() is None:
        return ["needs a C++ compiler and finds none: install one, e.g. `apt install g++`"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        return [f"needs Python's headers, and there is no {headers}: `apt install python3-dev`"]
    return []


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [InductorCompiler()]
