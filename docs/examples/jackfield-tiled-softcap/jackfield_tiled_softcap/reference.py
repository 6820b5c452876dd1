"""What the kernel means, in torch: made to be read, and to be compared with."""

from __future__ import annotations

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """softmax(query · key · scaling) · value; scores squashed by cap · tanh(score / cap) first.

    Query `[rows, heads, queries, head_dim]`, key and value `[rows, kv_heads, keys, head_dim]`, any
    strides; mask bool `[rows or 1, 1, queries, keys]`, True where seen, None: all is seen. Returns
    `[rows, queries, heads, head_dim]`, contiguous, in the dtype of the query. Changes nothing.
    """
    # Grouped-query attention: so many heads in a row share one head of keys and values.
    group = query.shape[1] // key.shape[1]
    dtype = query.dtype
    wide = torch.promote_types(dtype, torch.float32)  # 16 bits are too few for a softmax
    query, key, value = (t.to(wide) for t in (query, key, value))
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        # The lowest number and not -inf: a row that is all padding must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    output = scores.softmax(dim=-1) @ value
    return output.transpose(1, 2).to(dtype).contiguous()
