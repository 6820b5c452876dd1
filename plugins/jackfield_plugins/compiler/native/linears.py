"""Linears of few rows, as calls of the kernel."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch

from jackfield.contracts.native import NativeCall
from jackfield_plugins.native import NativeKernel

KERNEL = NativeKernel("native", Path(__file__).parent, instead="'none'")
address = KERNEL.address  # of a function
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FEW_TURNED = 8  # rows, up to which a linear is faster here, where those of a weight are its inputs

LINEAR = struct.Struct("@11q")  # `struct Linear`


def few(dtype: torch.dtype) -> int:
    """Up to how many rows a linear is faster here than torch's."""
    return 128 if dtype is torch.bfloat16 else 64


def form(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Which of the kernel's linears computes it, if any does; `weight` is `[out, in_features]`."""
    if not (
        x.dtype in FLOATS
        and x.dtype is weight.dtype is out.dtype
        and weight.dim() == 2
        and weight.shape == (out.shape[-1], x.shape[-1])
        and 1 in weight.stride()
        and x.is_contiguous()
        and out.is_contiguous()
        and (bias is None or _is_bias(bias, weight))
    ):
        return None
    order = "linear" if weight.stride(1) == 1 else "turned"
    return f"{order}_{str(x.dtype).removeprefix('torch.')}"


def _is_bias(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = bias.dtype is weight.dtype and bias.shape == weight.shape[:1]
    return fits and bias.is_contiguous()


def linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> NativeCall | None:
    rows, name = math.prod(x.shape[:-1]), form(out, x, weight, bias)
    if name is None:
        return None
    turned = name.startswith("turned")
    if rows > (FEW_TURNED if turned else few(x.dtype)):
        return None
    outer, inner = weight.shape
    arguments = LINEAR.pack(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, inner, outer, inner, weight.stride(int(turned)), outer, torch.get_num_threads(),
    )  # fmt: skip
    keeps = (x, weight, bias, out)
    return NativeCall(address(name), arguments, keeps, address(f"{name}_together"), by_row=True)


def addmm(
    out: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **scaled: Any
) -> NativeCall | None:
    """`weight` is `[in_features, out_features]`, as in GPT-2."""
    if scaled or bias.dim() != 1:
        return None
    return linear(out, x, weight.t(), bias)
