"""A right kernel in plain torch: RMSNorm as Llama has it; wrong ones grow from it."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.contracts import (
    BindContext,
    FusedLayer,
    FusedRotary,
    Kernel,
    KernelCapabilities,
    rotary_of,
)


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


def rotating(module: Any, turn: Any = rotate_alone) -> Any:
    """`turn`, but for calls that say more, which the layer's own function gets."""
    own: Any = rotary_of(module)

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **more: Any) -> Any:
        if args or more:
            return own(q, k, cos, sin, *args, **more)
        return turn(q, k, cos, sin)

    return rotate


class RightRotary(Kernel):
    name = "right-rotary"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}), batch_invariant=True)

    def fits(self, module: Any, options: Any) -> bool:
        return type(module).__name__ in ("LlamaAttention", "Phi3Attention")

    def bind(self, context: BindContext) -> FusedRotary:
        return FusedRotary(rotating)
