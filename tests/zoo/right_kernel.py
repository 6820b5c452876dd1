"""A right kernel in plain torch: RMSNorm as Llama has it; wrong ones grow from it."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities


def normed(rows: Any, epsilon: float) -> Any:
    """Rows over the root of their mean square, in float32."""
    wide = rows.float()
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)


def make(module: Any) -> Any:
    def forward(rows: Any) -> Any:
        return module.weight * normed(rows, module.variance_epsilon).to(rows.dtype)

    return forward


class Right(Kernel):
    name = "right"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}), batch_invariant=True)

    def fits(self, module: Any, options: Any) -> bool:
        return type(module).__name__ == "LlamaRMSNorm"

    def bind(self, context: BindContext) -> FusedLayer:
        return FusedLayer(make)
