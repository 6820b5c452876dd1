"""``triton-rms-norm``: RMSNorm in one pass, written here in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities, Requirements
from jackfield_plugins.interpreting import interpreting, without_triton
from jackfield_plugins.kernel.rms_norm import is_rms_norm, meaning_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class TritonRmsNorm(Kernel):
    """One program a row, which is read once and written once; eager reads it several times."""

    name = "triton-rms-norm"
    capabilities = KernelCapabilities(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        batch_invariant=True,
        recordable=True,
    )

    def rank(self, requirements: Requirements) -> int | None:
        """For `auto` on a GPU, where steps are recorded: else launching takes longer."""
        return 10 if requirements.device == "cuda" and requirements.recorded else None

    def available(self) -> list[str]:
        return without_triton()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.device == "cpu" and not interpreting():
            reasons.append("runs on a CPU only under TRITON_INTERPRET=1, set before Python starts")
        return reasons

    def fits(self, module: nn.Module, options: Any) -> bool:
        return is_rms_norm(module)

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_plugins.kernel.triton_rms_norm.kernels import rms_norm_kernel
        from jackfield_plugins.kernel.triton_rms_norm.launch import compiled, rms_norm

        def make(module: nn.Module) -> Any:
            meaning = meaning_of(module)
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            if weight.is_cuda:  # now, and in no request; rows mostly have the weight's dtype
                compiled(
                    rms_norm_kernel, weight.device, weight.dtype, weight.dtype, len(weight), meaning
                )

            def forward(hidden_states: torch.Tensor) -> torch.Tensor:
                return rms_norm(hidden_states, module.weight, meaning)  # type: ignore[arg-type]

            return forward

        return FusedLayer(make)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [TritonRmsNorm()]
