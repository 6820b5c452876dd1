"""The published signatures of varlen kernels, each brought to the one of `VarlenKernel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jackfield_plugins.attention.varlen import Attend, Rows, Scoring, VarlenKernel

#: What FlashAttention-2 asks of a page size (csrc/flash_attn/flash_api.cpp); torch's is a copy.
FLASH_PAGE_MULTIPLE = 256

#: The parameters by which a kernel has a feature, by the names that different kernels give them.
_PARAMETERS = {
    "sliding_window": ("window_size",),
    "softcap": ("softcap",),
    "sinks": ("s_aux", "learnable_sink"),
    "pages": ("block_table", "page_table"),
}

#: By which parameters `flash_attn_with_kvcache` of FlashAttention-3 is told from that of 2.
_WITH_KVCACHE = {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"}

_IN_PLACE = (
    "out", "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k", "do_causal", "scale", "softcapping",
)  # fmt: skip


def kernel_of(
    function: Callable[..., Any], with_kvcache: Callable[..., Any] | None = None
) -> VarlenKernel:
    """Wrap `function` by what its parameters say it is. Raises ValueError for an unknown one.

    `with_kvcache` is the `flash_attn_with_kvcache` of the same module, where it has one: that of
    FlashAttention-3 reads pages for rows of any lengths, which its varlen function does not.
    """
    parameters = inspect.signature(function).parameters
    if {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "causal"} <= parameters.keys():
        return _flash(function, parameters, with_kvcache)
    if next(iter(parameters), None) == "out" and len(parameters) >= len(_IN_PLACE):
        return _in_place(function)
    raise ValueError(
        f"its parameters ({', '.join(parameters)}) are neither those of flash_attn_varlen_func nor "
        "of flash_attention_varlen"
    )


def _flash(
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    with_kvcache: Callable[..., Any] | None,
) -> VarlenKernel:
    """`flash_attn_varlen_func` of flash-attn 2 and 3 and of the kernels that follow them."""
    names = _names(parameters)
    features = frozenset(f for f in ("sliding_window", "softcap", "sinks") if names[f])
    cached = None
    if not names["pages"] and with_kvcache is not None:
        cached = _cached(with_kvcache, features)

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        if rows.block_table is not None and cached is not None:
            return cached(query, keys, values, rows, scoring)
        given = _given(names, rows, scoring)
        if rows.block_table is not None:
            given[_name(names, "pages")] = rows.block_table
        return _output(
            function(
                query, keys, values,
                cu_seqlens_q=rows.cu_seqlens_q, cu_seqlens_k=rows.cu_seqlens_k,
                max_seqlen_q=rows.max_seqlen_q, max_seqlen_k=rows.max_seqlen_k,
                softmax_scale=scoring.scale, causal=scoring.causal, **given,
            )
        )  # fmt: skip

    pages = FLASH_PAGE_MULTIPLE if names["pages"] else None
    return VarlenKernel(attend, features | {"grouped_query"}, 1 if cached else pages)


def _cached(function: Callable[..., Any], features: frozenset[str]) -> Attend | None:
    """FlashAttention-3's `flash_attn_with_kvcache`; None for one that takes no rows or lacks any.

    It reads pages of any size (hopper/flash_attn_interface.py), and splits the keys by itself.
    """
    parameters = inspect.signature(function).parameters
    names = _names(parameters)
    if not parameters.keys() >= _WITH_KVCACHE or not all(names[f] for f in features):
        return None

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        return _output(
            function(
                query, keys, values,
                cache_seqlens=rows.seqused_k, page_table=rows.block_table,
                cu_seqlens_q=rows.cu_seqlens_q, max_seqlen_q=rows.max_seqlen_q,
                softmax_scale=scoring.scale, causal=scoring.causal,
                **_given(names, rows, scoring),
            )
        )  # fmt: skip

    return attend


def _names(parameters: Mapping[str, Any]) -> Mapping[str, str | None]:
    """What a kernel calls the parameter by which it has a feature, None where it has none."""
    return {
        what: next((name for name in spelt if name in parameters), None)
        for what, spelt in _PARAMETERS.items()
    }


def _given(names: Mapping[str, str | None], rows: Rows, scoring: Scoring) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if (window := rows.within(scoring.window)) is not None:
        # Inclusive: this many keys before the query's own.
        given[_name(names, "sliding_window")] = (window - 1, 0)
    if scoring.softcap is not None:
        given[_name(names, "softcap")] = scoring.softcap
    if scoring.sinks is not None:
        given[_name(names, "sinks")] = scoring.sinks
    return given


def _output(found: Any) -> torch.Tensor:
    """FlashAttention-3 may give the logarithm of the sum of exponentials as well."""
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output


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
    """torch's own flash kernel, `torch.nn.attention.varlen.varlen_attn`.

    The kernel takes grouped heads in every version; those that have `enable_gqa` ask to be told.
    """
    parameters = inspect.signature(function).parameters
    features = {"grouped_query"}
    features |= {"sliding_window"} if "window_size" in parameters else set()
    reads_pages = {"block_table", "seqused_k"} <= parameters.keys()
    told_of_groups = "enable_gqa" in parameters

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
    ) -> torch.Tensor:
        assert scoring.softcap is None
        assert scoring.sinks is None
        given: dict[str, Any] = {}
        if told_of_groups and query.shape[1] != keys.shape[-2]:
            given["enable_gqa"] = True
        if rows.block_table is not None:
            given |= {"block_table": rows.block_table, "seqused_k": rows.seqused_k}
        found: torch.Tensor = function(
            query, keys, values, rows.cu_seqlens_q, rows.cu_seqlens_k,
            rows.max_seqlen_q, rows.max_seqlen_k, scale=scoring.scale,
            window_size=_torch_window(rows, scoring), **given,
        )  # fmt: skip
        return found

    return VarlenKernel(attend, frozenset(features), FLASH_PAGE_MULTIPLE if reads_pages else None)


def _torch_window(rows: Rows, scoring: Scoring) -> tuple[int, int]:
    """How many keys before and after its own a query sees; -1: all of them.

    A single query is its sequence's last token, so nothing is after it. It must not be said all the
    same: any bound turns off the branch that lays a group's heads side by side and splits the keys
    (mha_varlen_fwd in FlashAttention's flash_api.cpp), which is the one for decode.
    """
    window = rows.within(scoring.window)
    if window is None and (rows.max_seqlen_q == 1 or not scoring.causal):
        return (-1, -1)
    return (-1 if window is None else window - 1, 0)
