"""A right attention in plain torch, for both layouts and every feature; wrong ones grow from it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from jackfield.contracts import Attention, AttentionCapabilities, BindContext, BoundAttention

FEATURES = frozenset(
    {"bidirectional_blocks", "bidirectional_prefix", "chunked", "cross_attention", "grouped_query",
     "mixed_head_sizes", "own_mask", "position_bias", "sinks", "sliding_window", "softcap"}
)  # fmt: skip


def attend(
    query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, softcap: Any = None,
    s_aux: Any = None, position_bias: Any = None,
) -> Any:  # fmt: skip
    """`[rows, heads, queries, size]` to the same; `mask` is bool, or added to the scores."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(3, dtype=exact).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def given(kwargs: Any) -> dict[str, Any]:
    names = ("scaling", "softcap", "s_aux", "position_bias")
    return {name: kwargs.get(name) for name in names}


def mask(**kwargs: Any) -> Any:
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(**kwargs)


def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    output = attend(query, key, value, mask, **given(kwargs))
    return output.transpose(1, 2).contiguous(), None


def packed(module: Any, query: Any, layer: Any, **kwargs: Any) -> Any:
    rows = []
    for row, span in enumerate(layer.step.spans):
        key, value = keys_of(layer, row, span)
        begin = span.query_start
        queries = query[begin : begin + span.query_len].transpose(0, 1)[None]
        at = torch.arange(layer.tables.firsts[row], span.kv_len)
        mine = at[-span.query_len :, None]
        seen = at <= mine
        if layer.tables.blocks is not None:
            seen = at < layer.tables.blocks.ends[begin : begin + span.query_len, None]
        if layer.window is not None:
            seen = seen & (at > mine - layer.window)
        output = attend(queries, key[None], value[None], seen[None, None], **given(kwargs))
        rows.append(output[0].transpose(0, 1))
    return torch.cat(rows)


def keys_of(layer: Any, row: int, span: Any) -> Any:
    """Keys and values of one sequence, from its first page on, `[kv_heads, keys, size]`."""
    pages = layer.tables.tables[row]
    count = span.kv_len - layer.tables.firsts[row]
    found = []
    for pool in (layer.keys, layer.values):
        whole = torch.cat([pool[page] for page in pages])
        found.append(whole[:count].transpose(0, 1))
    return found


class Right(Attention):
    name = "right"
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}), devices=frozenset({"cpu"}), features=FEATURES
    )

    def bind(self, context: BindContext) -> BoundAttention:
        return BoundAttention(forward, mask, packed)
