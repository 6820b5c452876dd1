"""Attention `tiled-softcap`: softmax(query · key) · value, for padded and for packed steps.

`kernels.py` computes it in Triton, `reference.py` says in torch what is meant.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
    Requirements,
)

if TYPE_CHECKING:  # this module is imported whenever jackfield looks for backends: keep it light
    import torch


class TiledSoftcapBackend(Attention):
    """What is declared here is what `jackfield check` proves; anything else is refused.

    A model that needs a feature which is not here is turned away before its weights are loaded.
    """

    name = "tiled-softcap"
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        devices=frozenset({"cuda", "cpu"}),  # a CPU in Triton's interpreter only
        head_dims=frozenset(range(2, 257, 2)),  # a program holds a whole head
        features=frozenset(
            {"grouped_query", "sliding_window", "softcap"}
        ),  # the window is in the mask
    )

    def available(self) -> list[str]:
        if importlib.util.find_spec("triton") is None:
            return ["triton is not installed: pip install triton"]
        import torch

        if torch.cuda.is_available() or interpreting():
            return []
        return ["there is no CUDA GPU; TRITON_INTERPRET=1 runs its kernels on a CPU, slowly"]

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.device == "cpu" and not interpreting():
            reasons.append("runs on a CPU only under TRITON_INTERPRET=1, set before Python starts")
        return reasons

    def bind(self, context: BindContext) -> BoundAttention:
        # A function and the mask that it understands are one thing; `packed` has no mask.
        return BoundAttention(forward, mask, packed)


def mask(**kwargs: Any) -> torch.Tensor:
    """bool `[batch, 1, queries, keys]`, True where a query sees a key: causality, window, padding.

    Called by transformers, once a step for each kind of layer. Without that argument it may be
    None, where torch's own function would know what to do.
    """
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**(kwargs | {"allow_is_causal_skip": False}))


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The padded layout, batch × time. Called once a layer in every step.

    Query `[batch, heads, queries, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]`,
    not repeated. The features that you declare come as keyword arguments.
    """
    from jackfield_tiled_softcap.kernels import attend

    return attend(query, key, value, attention_mask, scaling, softcap), None


def packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    layer: PackedLayer,
    *,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The packed layout: the tokens of all sequences in one row, keys and values in pages.

    Query `[tokens, heads, head_dim]`, strided. This goes sequence by sequence; a kernel for pages
    reads `layer.keys`, `layer.block_table`, `layer.step.cu_seqlens_q` and the like in place.
    """
    import torch

    from jackfield_tiled_softcap.kernels import attend

    outputs = []
    for row, span in enumerate(layer.step.spans):
        queries = query.narrow(0, span.query_start, span.query_len).transpose(0, 1)
        keys, values = layer.gather(row)  # [kv_heads, keys, head_dim], no older than the window
        given = (queries[None], keys[None], values[None], layer.mask(row))
        outputs.append(attend(*given, scaling, softcap)[0])
    return torch.cat(outputs)


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, which needs no GPU; it reads this once."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [TiledSoftcapBackend()]
