"""What products of many rows in the place of linear layers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    #: Of input `[..., in]`, weight and bias; None: it is not for these.
    Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]

ROWS = 5  # from which on they are faster for any layer; the proof has as many


def many_rows(
    module: nn.Module, dtypes: tuple[torch.dtype, ...], product: Product
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the place of a linear layer's `forward`: `product`, of plain tensors of one of
    `dtypes` on the CPU.

    What is not, few rows, and what `product` is not for are left to the layer's own.
    """
    import torch

    parameters, numbers = module._parameters, ROWS * int(module.in_features)  # type: ignore[arg-type]

    def plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)  # and nobody's class
            and tensor.dtype is dtype
            and tensor.is_cpu
            and tensor.layout is torch.strided
        )

    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as torch calls it)
        weight, bias = parameters["weight"], parameters["bias"]
        found = None
        if (
            weight is not None
            and 0 < numbers <= input.numel()
            and not torch.is_grad_enabled()
            and weight.dtype in dtypes
            and plain(weight, weight.dtype)
            and plain(input, weight.dtype)
            and (bias is None or plain(bias, weight.dtype))
            and input.shape[-1] == weight.shape[1]
        ):
            found = product(input, weight, bias)
        return type(module).forward(module, input) if found is None else found

    return forward
