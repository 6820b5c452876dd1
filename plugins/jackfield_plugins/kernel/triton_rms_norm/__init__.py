"""``triton-rms-norm``: RMSNorm in one pass, written here in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities
from jackfield_plugins.kernel.on_triton import TritonKernel
from jackfield_plugins.kernel.rms_norm import is_rms_norm, meaning_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class TritonRmsNorm(TritonKernel):
    """One program a row, which is read once and written once; eager reads it several times."""

    name = "triton-rms-norm"
    capabilities = KernelCapabilities(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        batch_invariant=True,
        recordable=True,
    )

    def fits(self, module: nn.Module, options: Any) -> bool:
        return is_rms_norm(module)

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_plugins.kernel.triton_rms_norm.launch import rms_norm, warm

        def make(module: Any) -> Any:
            meaning = meaning_of(module)
            warm(module.weight, meaning)

            def forward(hidden_states: torch.Tensor) -> torch.Tensor:
                return rms_norm(hidden_states, module.weight, meaning)

            return forward

        return FusedLayer(make)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [TritonRmsNorm()]
