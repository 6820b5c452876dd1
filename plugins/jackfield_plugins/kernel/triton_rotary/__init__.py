"""``triton-rotary``: rotary position embeddings of queries and keys in one kernel, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedRotary, Kernel, KernelCapabilities, rotary_of
from jackfield_plugins.kernel.on_triton import TritonKernel

if TYPE_CHECKING:
    from torch import nn


class TritonRotary(TritonKernel):
    """Where the two halves of a head are turned, as in Llama; eager is ten kernels a layer."""

    name = "triton-rotary"
    capabilities = KernelCapabilities(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        batch_invariant=True,
        recordable=True,
    )

    def fits(self, module: nn.Module, options: Any) -> bool:
        from jackfield_plugins.kernel.triton_rotary.halves import turns_halves

        own = rotary_of(module)
        return own is not None and turns_halves(own)

    def bind(self, context: BindContext) -> FusedRotary:
        from jackfield_plugins.kernel.triton_rotary.launch import rotary

        return FusedRotary(rotary)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [TritonRotary()]
