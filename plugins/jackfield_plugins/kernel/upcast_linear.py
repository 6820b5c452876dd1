"""``upcast-linear``: products of many rows in 16 bits, computed in float32.

torch multiplies bfloat16 and float16 fast on processors that have instructions for it. On others,
such as all that end at AVX2, it reaches a sixth of the speed of float32. Here the weights of a few
outputs at a time are made float32, which fit into a cache, and given to oneDNN (to MKL where torch
was built without it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities, Requirements
from jackfield_plugins.kernel.many_rows import many_rows
from jackfield_plugins.kernel.onednn_linear import product_of_onednn

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

PANEL = 1 << 20  # weights that are made float32 at a time: 4 MiB


class UpcastLinear(Kernel):
    """The library chooses how it computes by the number of rows, and so the last bits of each."""

    name = "upcast-linear"
    capabilities = KernelCapabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        batch_invariant=False,
        beside_compiled=True,
    )

    def rank(self, requirements: Requirements) -> int | None:
        """For `auto` where torch has no instructions for the dtype."""
        if requirements.device != "cpu" or requirements.dtype not in self.capabilities.dtypes:
            return None
        return None if _is_fast(requirements.dtype) else 10

    def fits(self, module: nn.Module, options: Any) -> bool:
        from torch import nn

        return type(module) is nn.Linear

    def bind(self, context: BindContext) -> FusedLayer:
        import torch

        return FusedLayer(linear_of, f"float32 products of torch {torch.__version__}")


def _is_fast(dtype: str) -> bool:
    """Whether torch's own products of `dtype` are oneDNN's, in instructions of this processor."""
    import torch

    known = torch.ops.mkldnn
    if dtype == "bfloat16":
        return bool(known._is_mkldnn_bf16_supported())
    return bool(known._is_mkldnn_fp16_supported())


def linear_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of a linear layer's `forward`: `[..., in]` to `[..., out]`, in the dtype
    of the weight, each number summed up in float32 and rounded once.
    """
    import torch

    run = product_of_onednn() or torch.nn.functional.linear
    step = max(1, PANEL // max(1, int(module.in_features)))  # type: ignore[arg-type]

    def product(
        given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = given.flatten(0, -2).float()
        out = given.new_empty(len(rows), len(weight))
        for at in range(0, len(weight), step):
            some = slice(at, at + step)
            more = None if bias is None else bias[some].float()
            out[:, some] = run(rows, weight[some].float(), more)  # type: ignore[assignment]
        return out.view(*given.shape[:-1], len(weight))

    return many_rows(module, (torch.bfloat16, torch.float16), product)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [UpcastLinear()]
