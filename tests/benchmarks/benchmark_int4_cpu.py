"""A linear layer of 4 bits on the CPU against torch's bfloat16 and 4-bit products, in turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.native import NativeProduct
from jackfield_plugins.quantizer.groupwise.quantize import dequantize
from jackfield_plugins.quantizer.groupwise.torch_kernel import TorchProduct

INPUTS, OUTPUTS = 896, 4864  # of a model of half a billion parameters
MEMORY = 60_000_000  # bytes of weights that are gone through, more than caches hold


@pytest.mark.parametrize("other", ["bfloat16", "torch-int4"])
@pytest.mark.parametrize("rows", [1, 8, 128])
def benchmark_linear(rows: int, other: str, alternate: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    mine = GroupwiseLinear.from_linear(plain, NativeProduct())
    theirs = plain if other == "bfloat16" else GroupwiseLinear.from_linear(plain, TorchProduct())
    count = MEMORY // mine.qweight.numel()
    ours, others = ([copy.deepcopy(layer) for _ in range(count)] for layer in (mine, theirs))
    hidden = torch.randn(rows, INPUTS).bfloat16()
    meant = torch.empty_like(plain.weight).copy_(dequantize(mine.quantized()))
    torch.testing.assert_close(mine(hidden), linear(hidden, meant), atol=0.05, rtol=0.02)

    def through(layers: list[nn.Module]) -> Any:
        return lambda: [layer(hidden) for layer in layers] and None

    with torch.inference_mode():
        alternate(through(ours), through(others), count)
