"""``onednn-linear``: float32 products of many rows through oneDNN, which torch has beside MKL.

torch gives float32 products on a CPU to MKL, which computes at half of what a processor of AMD's
can do. oneDNN's `linear` reads the weight as it lies, so nothing is held beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

ROWS = 5  # from which on it is faster for any layer; the proof has as many


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

        if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return []
        return [f"needs oneDNN, without which this torch {torch.__version__} was built"]

    def fits(self, module: nn.Module, options: Any) -> bool:
        from torch import nn

        return type(module) is nn.Linear

    def bind(self, context: BindContext) -> FusedLayer:
        import torch

        return FusedLayer(linear_of, f"oneDNN in torch {torch.__version__}")


def linear_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of a linear layer's `forward`: `[..., in]` to `[..., out]`, float32.

    What it does not understand, and few rows, are left to the layer's own.
    """
    import torch

    product = torch.ops.mkldnn._linear_pointwise.default
    parameters, numbers = module._parameters, ROWS * int(module.in_features)  # type: ignore[arg-type]

    def plain(tensor: torch.Tensor | None) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)  # and nobody's class
            and tensor.dtype is torch.float32  # type: ignore[union-attr]
            and tensor.is_cpu  # type: ignore[union-attr]
            and tensor.layout is torch.strided  # type: ignore[union-attr]
            and tensor.is_contiguous()  # type: ignore[union-attr]
        )

    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as torch calls it)
        weight, bias = parameters["weight"], parameters["bias"]
        if (
            not 0 < numbers <= input.numel()
            or torch.is_grad_enabled()
            or not plain(input)
            or not plain(weight)
            or not (bias is None or plain(bias))
            or input.shape[-1] != weight.shape[1]  # type: ignore[union-attr]
        ):
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        return product(input, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    return forward


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [OneDnnLinear()]
