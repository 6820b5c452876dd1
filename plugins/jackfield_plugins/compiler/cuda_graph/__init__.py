"""``cuda_graph``: what a step launches is recorded once, and played again.

Python launches the kernels of a step one by one, and where there are few tokens, launching can take
longer than computing. A recording launches them at once: those of a whole decode step, where
attention and cache are `recordable`; else those between two attentions, whose pages and lengths
change with each step. After "full" and "piecewise" graphs, as vLLM calls them
(https://docs.vllm.ai/en/latest/design/cuda_graphs/).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import BindContext, Compiler, CompilerCapabilities, Requirements
from jackfield_plugins.compiler.inductor_cache import cannot_keep
from jackfield_plugins.compiler.tracing import cannot_trace

if TYPE_CHECKING:
    from jackfield.contracts import Compilation


@dataclass(frozen=True)
class CudaGraphOptions:
    """What is recorded.

    `record`: "whole" decode steps, while a model is loaded, with all else run as it is; what lies
    "between" two attentions, when such a step first comes; or "both", the second for what the first
    leaves. `fuse`: inductor writes what a whole step does between two attentions anew, in fewer
    kernels, which takes it some time while a model is loaded.
    """

    record: Literal["whole", "between", "both"] = "whole"
    fuse: bool = False

    def __post_init__(self) -> None:
        if self.fuse and self.record == "between":
            raise ValueError("fuse is for steps that are recorded whole; take record=both")


class CudaGraphCompiler(Compiler):
    """CUDA graphs for 1, 2, 4, … rows, all of an engine in one pool of memory."""

    name = "cuda_graph"
    options = CudaGraphOptions
    capabilities = CompilerCapabilities(devices=frozenset({"cuda"}), records=True)

    def rank(self, requirements: Requirements) -> int | None:
        """For `auto` on a GPU, where steps of few tokens wait for Python."""
        return 10 if requirements.device == "cuda" else None

    def available(self) -> list[str]:
        import torch

        return [] if torch.cuda.is_available() else ["needs a CUDA GPU; none is here"]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if options.fuse or options.record != "whole":
            reasons += cannot_trace()
        return reasons + (cannot_keep() if options.fuse else [])

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """Whole steps are recorded as the model's code runs, and nothing else is compiled."""
        as_it_is = options.record == "whole" and not options.fuse
        return replace(super().imply(requirements, options), traced=not as_it_is)

    def unrecordable(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().unrecordable(requirements, options)
        return [*reasons, "record=between"] if options.record == "between" else reasons

    def bind(self, context: BindContext) -> Compilation:
        from jackfield_plugins.compiler.cuda_graph.compilation import RecordedCompilation
        from jackfield_plugins.compiler.cuda_graph.graphs import CudaGraphs

        assert context.model is not None
        return RecordedCompilation(context.model, CudaGraphs(context.device), context.options)


@hookimpl
def jackfield_compiler() -> list[Compiler]:
    return [CudaGraphCompiler()]
