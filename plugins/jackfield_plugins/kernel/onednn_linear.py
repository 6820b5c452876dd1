"""``onednn-linear``: float32 products of many rows through oneDNN, which torch has beside MKL.

torch gives float32 products on a CPU to MKL, which computes at half of what a processor of AMD's
can do. oneDNN's `linear` reads the weight as it lies, so nothing is held beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities
from jackfield_plugins.kernel.many_rows import many_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from jackfield_plugins.kernel.many_rows import Product


class OneDnnLinear(Kernel):
    """Which of its kernels runs, and so the last bits of a row, depends on the number of rows."""

    name = "onednn-linear"
    capabilities = KernelCapabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        batch_invariant=False,
        beside_compiled=True,
    )

    def available(self) -> list[str]:
        import torch

        if product_of_onednn() is not None:
            return []
        return [f"needs oneDNN, without which this torch {torch.__version__} was built"]

    def fits(self, module: nn.Module, options: Any) -> bool:
        from torch import nn

        return type(module) is nn.Linear

    def bind(self, context: BindContext) -> FusedLayer:
        import torch

        return FusedLayer(linear_of, f"oneDNN in torch {torch.__version__}")


def product_of_onednn() -> Product | None:
    """`linear` of dense float32 tensors on the CPU; None: torch was built without oneDNN."""
    import torch

    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows, weight, bias: run(rows, weight, bias, "none", [], "")


def linear_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of a linear layer's `forward`: `[..., in]` to `[..., out]`, float32."""
    import torch

    run = product_of_onednn()
    assert run is not None  # `available` has said so

    def product(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not all(one is None or one.is_contiguous() for one in (rows, weight, bias)):
            return None
        return run(rows, weight, bias)

    return many_rows(module, (torch.float32,), product)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [OneDnnLinear()]
