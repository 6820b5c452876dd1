"""``cpu-rms-norm``: RMSNorm in one call on the CPU, written here and compiled once a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    FusedLayer,
    Kernel,
    KernelCapabilities,
    NativeOperators,
    Requirements,
)
from jackfield_plugins.kernel.cpu_rms_norm.build import KERNEL
from jackfield_plugins.kernel.rms_norm import is_rms_norm

if TYPE_CHECKING:
    from torch import nn


class CpuRmsNorm(Kernel):
    """For one token, calling torch's seven operations takes longer than what they do."""

    name = "cpu-rms-norm"
    capabilities = KernelCapabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"bfloat16", "float32"}),
        batch_invariant=True,
        traceable=True,
    )

    def available(self) -> list[str]:
        return KERNEL.cannot_build()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        return super().refuse(requirements, options) or KERNEL.cannot_load()

    def fits(self, module: nn.Module, options: Any) -> bool:
        return is_rms_norm(module)

    def native_operators(self) -> NativeOperators:
        from jackfield_plugins.kernel.cpu_rms_norm.call import native_rms_norm

        return {"jackfield.cpu_rms_norm.default": native_rms_norm}

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_plugins.kernel.cpu_rms_norm.call import rms_norm_of

        def make(module: nn.Module) -> Any:
            return rms_norm_of(module)

        return FusedLayer(make, KERNEL.built_with())


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [CpuRmsNorm()]
