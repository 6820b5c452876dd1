"""``sdpa``: torch's `scaled_dot_product_attention`, with torch's choice of kernel or a named one.

A named kernel is pinned with torch's own context manager: where it cannot serve a call, torch
raises instead of falling back to another one without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
    Requirements,
)
from jackfield.contracts.requirements import DEVICES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class SdpaOptions:
    """`kernel`: which of torch's kernels; auto: torch picks for every call."""

    kernel: Literal["auto", "math", "flash", "efficient", "cudnn"] = "auto"


#: kernel -> (torch's name for it, devices, dtypes) as torch 2.11 to 2.13 have them
_KERNELS = {
    "math": ("MATH", DEVICES, DTYPES),
    "flash": ("FLASH_ATTENTION", ("cpu", "cuda"), DTYPES),
    "efficient": ("EFFICIENT_ATTENTION", ("cuda",), ("bfloat16", "float16", "float32")),
    "cudnn": ("CUDNN_ATTENTION", ("cuda",), ("bfloat16", "float16")),
}


BLOCK = 512  # queries that share a mask


class SdpaAttention(Attention):
    """Windows and chunks are in the mask; scores cannot be touched, so no softcap, no sinks."""

    name = "sdpa"
    options = SdpaOptions
    auto_rank = 10
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}),
        features=frozenset(
            {
                "bidirectional_blocks",
                "bidirectional_prefix",
                "chunked",
                "cross_attention",
                "grouped_query",
                "mixed_head_sizes",
                "own_mask",
                "sliding_window",
            }
        ),
        batch_invariant=True,
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if not reasons and "sdpa" in requirements.model_declines:
            reasons.append(f"{requirements.architecture} declares that it must not run with sdpa")
        if options.kernel != "auto":
            _, devices, dtypes = _KERNELS[options.kernel]
            if options.kernel == "flash" and requirements.device == "cuda":
                dtypes = ("bfloat16", "float16")
            for have, known in ((requirements.device, devices), (requirements.dtype, dtypes)):
                if have is not None and have not in known:
                    reasons.append(
                        f"kernel={options.kernel} runs on {', '.join(known)}, not {have}"
                    )
        return reasons

    def notice(self, requirements: Requirements) -> str | None:
        if requirements.layout != "packed" or requirements.device != "cuda":
            return None
        return "it attends to one sequence after another, in every layer"

    def bind(self, context: BindContext) -> BoundAttention:
        devices = context.requirements.computing_devices
        gpu = next((device for device in devices if device.startswith("cuda")), None)
        return torch_attention(context.options.kernel, gpu)


def torch_attention(kernel: str = "auto", gpu: str | None = None) -> BoundAttention:
    """torch's attention for both layouts, with the kernel of that name; `gpu`: where it computes.

    None: on no CUDA GPU.
    """
    from transformers.masking_utils import sdpa_mask

    from jackfield_plugins.attention.sdpa_flags import free_choice, pinned

    if kernel == "auto":
        attend, close = free_choice(gpu)
    else:
        attend, close = pinned(_KERNELS[kernel][0])
    if kernel in ("auto", "efficient"):
        attend = _with_own_heads(attend)
    return BoundAttention(_padded(attend), sdpa_mask, _packed(attend), close=close)


def _with_own_heads(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`attend`, where keys and values are repeated if no fused kernel takes them grouped."""

    def own_heads(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        if kwargs["enable_gqa"] and not _takes_groups(query, value, kwargs["attn_mask"]):
            group = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            kwargs["enable_gqa"] = False
        return attend(query, key, value, **kwargs)

    return own_heads


def _takes_groups(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes grouped heads, or there is none to lose.

    On a GPU that is torch's flash kernel: without a mask, of 16 bits, heads up to 256, of values
    as of keys. The memory-efficient one takes masks, float32 and other heads of values, and every
    head's own keys. Else all scores would be made in memory (torch's sdp_utils.cpp).
    """
    if not query.is_cuda:
        return True
    return mask is None and query.itemsize == 2 and value.shape[3] == query.shape[3] <= 256


def _padded(attend: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        length = query.shape[2]
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = attention_mask is None and length > 1 and is_causal
        if causal and key.shape[2] > length:
            # No mask and more keys than queries: a static cache whose tail is unwritten.
            key, value = key[:, :, :length], value[:, :, :length]
        output = attend(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).contiguous(), None

    return forward


def _packed(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    import torch

    def packed(
        module: torch.nn.Module,
        query: torch.Tensor,
        layer: PackedLayer,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        spans = layer.step.spans
        queries = query.transpose(0, 1)[None]
        if len(spans) == 1:
            return attend_row(attend, queries, layer, 0, scaling)[0].contiguous()
        parts = queries.split([span.query_len for span in spans], 2)
        rows = [attend_row(attend, q, layer, row, scaling) for row, q in enumerate(parts)]
        return torch.cat(rows, 1)[0]

    return packed


def attend_row(
    attend: Callable[..., torch.Tensor],
    queries: torch.Tensor,
    layer: PackedLayer,
    row: int,
    scaling: float | None,
) -> torch.Tensor:
    """One sequence of a packed step through torch's function.

    Queries `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`. Memory is linear in
    the keys: where a mask is needed, the queries go in blocks, each with the keys that it sees.
    """
    import torch

    keys, values = layer.gather(row)
    length, cached = queries.shape[2], keys.shape[1]
    grouped = queries.shape[1] != keys.shape[0]
    ends = layer.ends(row)
    # A prompt from its first token on: causal without a mask.
    whole = length > 1 and cached == length and layer.window is None and ends is None
    if whole or length <= BLOCK:
        mask = None if whole else layer.mask(row)
        found = attend(
            queries, keys[None], values[None],
            attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=grouped,
        )  # fmt: skip
        return found.transpose(1, 2)
    blocks: list[torch.Tensor] = []
    oldest = layer.tables.oldest(row)  # of which keys and values are the first
    for block in queries.split(BLOCK, 2):
        first = BLOCK * len(blocks)
        position = oldest + cached - length + first
        end = _behind(layer, row, position + block.shape[2]) - oldest
        begin = 0 if layer.window is None else max(0, position - layer.window + 1 - oldest)
        at = torch.arange(begin + oldest, end + oldest, device=keys.device)
        mine = torch.arange(position, position + block.shape[2], device=keys.device)[:, None]
        mask = layer.seen(mine, at, None if ends is None else ends[first : first + block.shape[2]])
        found = attend(
            block, keys[None, :, begin:end], values[None, :, begin:end],
            attn_mask=mask, scale=scaling, enable_gqa=grouped,
        )  # fmt: skip
        blocks.append(found)
    return torch.cat(blocks, 2).transpose(1, 2)


def _behind(layer: PackedLayer, row: int, after: int) -> int:
    """The position behind the last key that queries before `after` see."""
    blocks = layer.tables.blocks
    of = () if blocks is None else blocks.of[row]
    return next((end for begin, end in of if begin < after < end), after)


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [SdpaAttention()]
