"""``none``: a step runs as the model's code has it."""

from __future__ import annotations

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Uncompiled


class NoCompiler(Compiler):
    """Every operation by itself, called by Python."""

    name = "none"
    auto_rank = 0
    compiles = False
    capabilities = CompilerCapabilities(batch_invariant=True)

    def bind(self, context: BindContext) -> Uncompiled:
        return Uncompiled()


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [NoCompiler()]
