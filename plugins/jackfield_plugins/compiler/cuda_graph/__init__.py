"""``cuda_graph``: what a step launches between two attentions is recorded once, and played again.

Python launches the kernels of a step one by one, and where there are few tokens, launching can take
longer than computing. A recording launches those of a whole stretch at once. The attention is left
out, since its pages and lengths change with each step; after "piecewise" graphs, as vLLM calls them
(https://docs.vllm.ai/en/latest/design/cuda_graphs/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Requirements
from jackfield_plugins.compiler.tracing import cannot_trace

if TYPE_CHECKING:
    from jackfield.contracts import Compilation


class CudaGraphCompiler(Compiler):
    """CUDA graphs for 1, 2, 4, … rows, all of an engine in one pool of memory."""

    name = "cuda_graph"
    capabilities = CompilerCapabilities(devices=frozenset({"cuda"}))

    def available(self) -> list[str]:
        import torch

        return [] if torch.cuda.is_available() else ["needs a CUDA GPU; none is here"]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return super().refuse(requirements, options) or cannot_trace()

    def bind(self, context: BindContext) -> Compilation:
        from jackfield_plugins.compiler.cuda_graph.graphs import CudaGraphs
        from jackfield_plugins.compiler.cuda_graph.stretches import RecordedCompilation

        assert context.model is not None
        graphs = CudaGraphs(context.device)
        return RecordedCompilation(type(context.model).__name__, graphs)


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [CudaGraphCompiler()]
