"""``cpu_decode``: one query token as two matrix products on the CPU, everything longer as sdpa.

Decoding reads every key and value once, so memory bandwidth is the limit. torch's kernel works
query head by query head; here the query heads that share a key/value head are the rows of one
product, so that with grouped queries keys and values are read once a group, not once a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
)
from jackfield_plugins.attention.sdpa import SdpaAttention, torch_attention

if TYPE_CHECKING:
    import torch


class CpuDecodeAttention(Attention):
    """Prefill is torch's sdpa, decode is written here."""

    name = "cpu_decode"
    capabilities = AttentionCapabilities(
        layouts=SdpaAttention.capabilities.layouts,
        devices=frozenset({"cpu"}),
        features=SdpaAttention.capabilities.features - {"own_mask"},  # takes boolean masks only
    )

    def bind(self, context: BindContext) -> BoundAttention:
        import torch

        sdpa = torch_attention()
        long, long_packed = sdpa.forward, sdpa.packed
        assert long_packed is not None

        def forward(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            if query.shape[2] > 1:
                return long(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
            return attend_one(query, key, value, attention_mask, kwargs.get("scaling")), None

        def packed(
            module: torch.nn.Module, query: torch.Tensor, layer: PackedLayer, **kwargs: Any
        ) -> torch.Tensor:
            if layer.step.max_query_length > 1:
                return long_packed(module, query, layer, **kwargs)  # type: ignore[no-any-return]
            rows = []
            for row in range(len(query)):
                keys, values = layer.gather(row)
                one = query[row][None, :, None]
                rows.append(attend_one(one, keys[None], values[None], None, kwargs.get("scaling")))
            return torch.cat(rows, 1)[0] if len(rows) > 1 else rows[0][0]

        return BoundAttention(forward, sdpa.mask, packed)


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one query token a row.

    query `[batch, heads, 1, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]`, mask
    bool `[batch, 1, 1, keys]` or None; returns `[batch, 1, heads, value head_dim]`. The softmax is
    in float32 at least.
    """
    import torch

    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, size)
    scale = size**-0.5 if scaling is None else scaling
    scores = torch.matmul(grouped, key.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(value.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, value.shape[-1])


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [CpuDecodeAttention()]
