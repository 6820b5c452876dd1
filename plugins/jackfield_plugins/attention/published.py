"""The published signatures of varlen kernels, each brought to the one of `VarlenKernel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jackfield_plugins.attention.varlen import Rows, Scoring, VarlenKernel

#: What FlashAttention-2 asks of a page size (csrc/flash_attn/flash_api.cpp); torch's is a copy.
FLASH_PAGE_MULTIPLE = 256

#: The parameters by which a kernel has a feature, by the names that different kernels give them.
_PARAMETERS = {
    "sliding_window": ("window_size",),
    "softcap": ("softcap",),
    "sinks": ("s_aux", "learnable_sink"),
    "pages": ("block_table", "page_table"),
}

_IN_PLACE = (
    "out", "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k", "do_causal", "scale", "softcapping",
)  # fmt: skip


def kernel_of(function: Callable[..., Any]) -> VarlenKernel:
    """Wrap `function` by what its parameters say it is. Raises ValueError for an unknown one."""
    parameters = inspect.signature(function).parameters
    if {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "causal"} <= parameters.keys():
        return _flash(function, parameters)
    if next(iter(parameters), None) == "out" and len(parameters) >= len(_IN_PLACE):
        return _in_place(function)
    raise ValueError(
        f"its parameters ({', '.join(parameters)}) are neither those of flash_attn_varlen_func nor "
        "of flash_attention_varlen"
    )


def _flash(function: Callable[..., Any], parameters: Mapping[str, Any]) -> VarlenKernel:
    """`flash_attn_varlen_func` of flash-attn 2 and 3 and of the kernels that follow them."""
    names = {
        what: next((name for name in spelt if name in parameters), None)
        for what, spelt in _PARAMETERS.items()
    }

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        given: dict[str, Any] = {}
        if scoring.window is not None:
            # Inclusive: this many keys before the query's own.
            given[_name(names, "sliding_window")] = (scoring.window - 1, 0)
        if scoring.softcap is not None:
            given[_name(names, "softcap")] = scoring.softcap
        if scoring.sinks is not None:
            given[_name(names, "sinks")] = scoring.sinks
        if rows.block_table is not None:
            given[_name(names, "pages")] = rows.block_table
        found = function(
            query, keys, values,
            cu_seqlens_q=rows.cu_seqlens_q, cu_seqlens_k=rows.cu_seqlens_k,
            max_seqlen_q=rows.max_seqlen_q, max_seqlen_k=rows.max_seqlen_k,
            softmax_scale=scoring.scale, causal=scoring.causal, **given,
        )  # fmt: skip
        # FlashAttention-3 gives the logarithm of the sum of exponentials as well.
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output

    features = frozenset(f for f in ("sliding_window", "softcap", "sinks") if names[f])
    pages = FLASH_PAGE_MULTIPLE if names["pages"] else None
    return VarlenKernel(attend, features | {"grouped_query"}, pages)


def _name(names: Mapping[str, str | None], what: str) -> str:
    name = names[what]
    assert name is not None, f"planned with {what}, which the kernel has no parameter for"
    return name


def _in_place(function: Callable[..., Any]) -> VarlenKernel:
    """`flash_attention_varlen` of metal-flash-sdpa: writes into its first argument.

    Older builds read keys and values that are not contiguous as if they were. A softcap of 1.0
    stands for none.
    """

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        assert scoring.window is None
        assert scoring.sinks is None
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
        function(
            output, query.contiguous(), keys.contiguous(), values.contiguous(),
            rows.cu_seqlens_q, rows.cu_seqlens_k, rows.max_seqlen_q, rows.max_seqlen_k,
            scoring.causal, scale, _softcapping(scoring.softcap),
        )  # fmt: skip
        return output

    return VarlenKernel(attend, frozenset({"grouped_query", "softcap"}))


def _softcapping(softcap: float | None) -> float:
    if softcap is None:
        return 1.0
    # The next float32 after 1: a cap of just 1 would be read as no cap.
    return 1.0 + 2.0**-23 if softcap == 1.0 else softcap


def torch_varlen(function: Callable[..., Any]) -> VarlenKernel:
    """torch's own flash kernel, `torch.nn.attention.varlen.varlen_attn`."""
    parameters = inspect.signature(function).parameters
    features = {"grouped_query"} if "enable_gqa" in parameters else set()
    features |= {"sliding_window"} if "window_size" in parameters else set()
    reads_pages = {"block_table", "seqused_k"} <= parameters.keys()

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        assert scoring.softcap is None
        assert scoring.sinks is None
        given: dict[str, Any] = {}
        if scoring.window is not None or scoring.causal:
            left = -1 if scoring.window is None else scoring.window - 1
            given["window_size"] = (left, 0)
        if query.shape[1] != keys.shape[-2]:
            given["enable_gqa"] = True
        if rows.block_table is not None:
            given |= {"block_table": rows.block_table, "seqused_k": rows.cu_seqlens_k.diff()}
        found: torch.Tensor = function(
            query, keys, values, rows.cu_seqlens_q, rows.cu_seqlens_k,
            rows.max_seqlen_q, rows.max_seqlen_k, scale=scoring.scale, **given,
        )  # fmt: skip
        return found

    return VarlenKernel(attend, frozenset(features), FLASH_PAGE_MULTIPLE if reads_pages else None)
