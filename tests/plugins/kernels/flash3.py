"""FlashAttention-3's two functions in plain torch, strict about inputs; `flash` lies beside it.

Its varlen function reads no pages, and `flash_attn_with_kvcache` does, for rows of any lengths.
"""

import torch
from flash import attend

calls = []


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
):
    assert q.shape[0] >= cu_seqlens_q[-1]
    assert k.shape[0] == v.shape[0] >= cu_seqlens_k[-1]
    calls.append("varlen")
    rows = zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False)
    outputs = [
        attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size, softcap)
        for a, b, c, d in rows
    ]
    return torch.cat([*outputs, torch.full_like(q[cu_seqlens_q[-1] :], float("nan"))]), "lse"


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=0,
    return_softmax_lse=False,
):
    assert q.dim() == 3
    assert k_cache.dim() == v_cache.dim() == 4
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    for small in (cache_seqlens, page_table, cu_seqlens_q):
        assert small.dtype == torch.int32
        assert small.is_contiguous()
    assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert page_table.shape[1] * k_cache.shape[1] >= cache_seqlens.max()
    assert isinstance(window_size, tuple)
    calls.append("pages")
    outputs = []
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = page_table[row].long()
        keys, values = (t[pages].flatten(0, 1)[:length] for t in (k_cache, v_cache))
        queries = q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]]
        outputs.append(attend(queries, keys, values, softmax_scale, causal, window_size, softcap))
    return torch.cat(outputs)
