"""A right kernel in plain torch: RMSNorm as Llama has it; wrong ones grow from it."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.contracts import BindContext, FusedLayer, FusedRotary, Kernel, KernelCapabilities


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


def turned(states: Any, cos: Any, sin: Any) -> Any:
    """The first half of what is turned of a head against the second; the rest as it is."""
    part, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = part.chunk(2, -1)
    crossed = torch.cat((-second, first), -1)
    return torch.cat((part * cos[:, None] + crossed * sin[:, None], rest), -1)


def rotate_alone(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turned(q, cos, sin), turned(k, cos, sin)


def rotate(q: Any, k: Any, cos: Any, sin: Any, **more: Any) -> Any:
    return rotate_alone(q, k, cos, sin)


class RightRotary(Kernel):
    name = "right-rotary"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}), batch_invariant=True)

    def fits(self, module: Any, options: Any) -> bool:
        return type(module).__name__ in ("LlamaAttention", "Phi3Attention")

    def bind(self, context: BindContext) -> FusedRotary:
        return FusedRotary(lambda module: rotate)
