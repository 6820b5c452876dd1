"""``native``: a decode step as one call of compiled code, on a CPU.

What Python does between two kernels of a step takes longer than most of them. Here a step is traced
once, laid out in memory, and run as a list of calls of compiled functions; nothing is compiled for
a model, so a graph is ready when it was traced, or read from disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Requirements
from jackfield.errors import PlanError

if TYPE_CHECKING:
    from jackfield.contracts import Compilation


class NativeCompiler(Compiler):
    """Programs for 1, 2, 4, … tokens; operators of torch that have no native form are called."""

    name = "native"
    capabilities = CompilerCapabilities(devices=frozenset({"cpu"}))

    def rank(self, requirements: Requirements) -> int | None:
        """For `auto` only where `jackfield warm` has put the model's graphs on disk."""
        from jackfield_plugins.compiler.native.warmed import is_marked

        return 10 if requirements.device == "cpu" and is_marked(requirements) else None

    def warmed(self, requirements: Requirements) -> None:
        from jackfield_plugins.compiler.native.warmed import mark
        from jackfield_plugins.native.keeping import KeepingError

        try:
            mark(requirements)
        except KeepingError as error:
            raise PlanError(f"native: {error}") from None

    def available(self) -> list[str]:
        from jackfield_plugins.compiler.native.linears import KERNEL

        return KERNEL.cannot_build()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        from jackfield_plugins.compiler.native.linears import KERNEL

        reasons = super().refuse(requirements, options)
        if requirements.counts_rows:
            reasons.append(f"needs shapes that are known; here {requirements.counts_rows}")
        return reasons or KERNEL.cannot_load()

    def bind(self, context: BindContext) -> Compilation:
        from jackfield_plugins.compiler.native.compilation import NativeCompilation

        assert context.model is not None
        return NativeCompilation(context.model)


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [NativeCompiler()]
