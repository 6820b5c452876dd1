"""``triton-one-row``: products of one row at the speed of memory, written here in Triton.

A decode step of one sequence reads every weight once and computes next to nothing. Libraries split
such a product into tiles of 64 or more columns and rows of which one is real, and small weights
into pieces whose sums another kernel adds; here every program reads its rows of the weight from the
first number to the last. Of a gated MLP both products and what is between them are one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities
from jackfield_plugins.kernel.on_triton import TritonKernel

if TYPE_CHECKING:
    from torch import nn


class TritonOneRow(TritonKernel):
    """`nn.Linear`, and MLPs of three of them with SiLU, given one row.

    Products of more rows are the layers' own; what is between those of an MLP is one kernel.
    """

    name = "triton-one-row"
    capabilities = KernelCapabilities(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        recordable=True,
    )

    def fits(self, module: nn.Module, options: Any) -> bool:
        return _is_linear(module) or _is_gated(module)

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_plugins.kernel.triton_one_row.launch import gated, linear

        def make(module: Any) -> Any:
            return gated(module) if _is_gated(module) else linear(module)

        return FusedLayer(make)


def _is_linear(module: Any) -> bool:
    """Whether it is torch's own layer, with a weight that is a plain tensor."""
    from torch import nn

    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _is_gated(module: Any) -> bool:
    """Whether it is down(silu(gate(x)) · up(x)), by its class's name and its parts.

    The engine compares numbers.
    """
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = type(getattr(module, "act_fn", None)).__name__
    return (
        type(module).__name__.endswith("MLP")
        and all(map(_is_linear, parts))
        and all(part.bias is None for part in parts if part is not None)
        and activation in ("SiLU", "SiLUActivation")
        and len(list(module.parameters())) == 3
    )


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [TritonOneRow()]
