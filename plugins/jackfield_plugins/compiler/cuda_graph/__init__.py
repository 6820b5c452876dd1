"""``cuda_graph``: what a step launches is recorded once, and played again.

Python launches the kernels of a step one by one, and where there are few tokens, launching can take
longer than computing. A recording launches them at once: those of a whole decode step, where
attention and cache are `recordable`; else those between two attentions, whose pages and lengths
change with each step. After "full" and "piecewise" graphs, as vLLM calls them
(https://docs.vllm.ai/en/latest/design/cuda_graphs/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Requirements
from jackfield_plugins.compiler.inductor_cache import cannot_keep
from jackfield_plugins.compiler.tracing import cannot_trace

if TYPE_CHECKING:
    from jackfield.contracts import Compilation


@dataclass(frozen=True)
class CudaGraphOptions:
    """What is recorded.

    `whole`: whole decode steps are recorded while a model is loaded, where that can be done.
    `fuse`: inductor writes what such a step does between two attentions anew, in fewer kernels.
    """

    whole: bool = True
    fuse: bool = True


class CudaGraphCompiler(Compiler):
    """CUDA graphs for 1, 2, 4, … rows, all of an engine in one pool of memory."""

    name = "cuda_graph"
    options = CudaGraphOptions
    capabilities = CompilerCapabilities(devices=frozenset({"cuda"}), records=True)

    def available(self) -> list[str]:
        import torch

        return [] if torch.cuda.is_available() else ["needs a CUDA GPU; none is here"]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options) or cannot_trace()
        if not reasons and options.whole and options.fuse and (without := cannot_keep()):
            return [f"{'; '.join(without)}; or take fuse=false"]
        return reasons

    def unrecordable(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().unrecordable(requirements, options)
        return reasons if options.whole else [*reasons, "whole=false"]

    def bind(self, context: BindContext) -> Compilation:
        from jackfield_plugins.compiler.cuda_graph.graphs import CudaGraphs
        from jackfield_plugins.compiler.cuda_graph.stretches import RecordedCompilation

        assert context.model is not None
        graphs = CudaGraphs(context.device)
        return RecordedCompilation(type(context.model).__name__, graphs, fuse=context.options.fuse)


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [CudaGraphCompiler()]
