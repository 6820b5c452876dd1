"""An attention to pages, in torch's own operations, that can be recorded: a stranger's."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
)
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry


def gathered(
    query: torch.Tensor,
    layer: PackedLayer,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Single queries, over all that a row's table has room for; lengths are read on the device."""
    _, heads, size = query.shape
    table = layer.block_table.long()
    keys, values = (pool[table].flatten(1, 2) for pool in (layer.keys, layer.values))
    group = heads // keys.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
    scores = torch.einsum("rhd,rkhd->rhk", query, keys)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = layer.first[:, None] + torch.arange(keys.shape[1], device=query.device)
    ends = layer.step.seq_lens[:, None]
    seen = at < ends
    if layer.window is not None:
        seen = seen & (at >= ends - layer.window)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    values = values.masked_fill(~seen[:, :, None, None], 0.0)  # 0 times nothing is not 0
    return torch.einsum("rhk,rkhd->rhd", shares(scores, s_aux), values)


def shares(scores: torch.Tensor, s_aux: torch.Tensor | None) -> torch.Tensor:
    """Softmax of `[rows, heads, keys]`, with a sink for each head."""
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[None, :, None].expand(len(scores), -1, 1)
        return torch.softmax(torch.cat([scores, sinks], 2), 2)[:, :, :-1]
    return torch.softmax(scores, 2)


def in_turn(
    query: torch.Tensor,
    layer: PackedLayer,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Any queries, sequence by sequence, by what the host knows."""
    rows = []
    for row, span in enumerate(layer.step.spans):
        queries = query[span.query_start : span.query_start + span.query_len]
        keys, values = layer.gather(row)
        group = query.shape[1] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("qhd,hkd->qhk", queries, keys)
        scores = scores * (query.shape[2] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if (seen := layer.mask(row)) is not None:
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
        rows.append(torch.einsum("qhk,hkd->qhd", shares(scores, s_aux), values))
    return torch.cat(rows)


class Gathers(Attention):
    """Single queries are gathered, longer ones go in turn."""

    name = "gathers"
    capabilities = AttentionCapabilities(
        layouts=frozenset({"packed"}),
        features=frozenset(
            {"grouped_query", "mixed_head_sizes", "sliding_window", "softcap", "sinks"}
        ),
        recordable=True,
    )

    def bind(self, context: BindContext) -> Any:
        def packed(module: Any, query: Any, layer: PackedLayer, **kwargs: Any) -> Any:
            attend = in_turn if layer.step.max_seqlen_q > 1 else gathered
            named = {name: kwargs.get(name) for name in ("scaling", "softcap", "s_aux")}
            return attend(query, layer, **named)

        return BoundAttention(_not_padded, _not_padded, packed)


def _not_padded(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def offer(monkeypatch: Any) -> None:
    mine = Registered(Gathers(), "stranger", "1.0", "gathers-ep")
    known = registry().backends["attention"]
    monkeypatch.setitem(registry().backends, "attention", [*known, mine])
