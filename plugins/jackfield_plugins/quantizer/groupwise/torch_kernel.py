"""torch's own products with weights of 4 bits: for machines without a compiler.

The layout that they want depends on the processor and torch does not say how to undo it, so the
stored form is read off a product with the identity, which is exact.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from jackfield.errors import PlanError
from jackfield_plugins.quantizer.groupwise.quantize import Quantized

UNIT = 64  # outputs that torch lays out together


class TorchProduct:
    """Products through `aten._weight_int4pack_mm_for_cpu`, with zero points that do nothing."""

    name = "torch"
    batch_invariant = False

    def pack(self, quantized: Quantized, bits: int) -> Quantized:
        """torch's bytes, and `[groups, outputs, 2]` of scale and zero."""
        if bits != 4:
            raise PlanError(f"int4-cpu: torch's kernel has no weights of {bits} bits in groups")
        qweight, scales = quantized
        missing = -len(qweight) % UNIT
        integers = torch.stack([qweight & 15, qweight >> 4], -1).flatten(1).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            pad(integers, (0, 0, 0, missing)), 1
        )
        filled = pad(scales, (0, 0, 0, missing)).T
        return Quantized(packed, torch.stack([filled, torch.zeros_like(filled)], -1))

    def unpack(self, packed: Quantized, out_features: int, bits: int) -> Quantized:
        """What `pack` was given, bit by bit."""
        qweight, scales = packed
        groups, outputs, _ = scales.shape
        in_features = qweight.numel() * 2 // outputs
        ones = torch.ones_like(scales)
        ones[..., 1] = 0
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        stored = torch.empty(out_features, in_features, dtype=torch.uint8)
        for some in torch.arange(in_features).split(256):
            rows = torch.zeros(len(some), in_features, dtype=torch.bfloat16)
            rows[torch.arange(len(some)), some] = 1
            integers = product(rows, qweight, in_features // groups, ones)
            stored[:, some] = (integers[:, :out_features].T + 8).to(torch.uint8)
        canonical = stored[:, ::2] | stored[:, 1::2] << 4
        return Quantized(canonical, scales[:, :out_features, 0].T.contiguous())

    def linear(
        self,
        hidden: torch.Tensor,
        packed: Quantized,
        bias: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> torch.Tensor:
        """`[..., in_features]` of bfloat16 to `[..., out_features]`."""
        in_features, out_features, group_size, _ = sizes
        rows = hidden.reshape(-1, in_features).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: torch.Tensor = product(rows, packed[0], group_size, packed[1])[:, :out_features]
        if bias is not None:
            out = out + bias
        return out.reshape(*hidden.shape[:-1], out_features)
