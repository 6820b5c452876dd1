"""`flash_attn_varlen_func` as flash-attn 2 publishes it, in plain torch, strict about inputs.

Like the real one it knows the lengths on the device alone: it writes no output behind the last row.
"""

import torch

calls = []


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    block_table=None,
):
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert q.dtype == k.dtype == v.dtype
    assert not dropout_p
    assert not return_attn_probs
    assert isinstance(window_size, tuple)
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    assert q.shape[0] >= cu_seqlens_q[-1]
    if max_seqlen_q == 1:  # it lays a query of each row side by side
        assert q.shape[0] == len(cu_seqlens_q) - 1
    calls.append({"window": window_size, "softcap": softcap, "paged": block_table is not None})
    if block_table is None:
        assert k.shape[0] == v.shape[0] >= cu_seqlens_k[-1]
    else:
        assert block_table.dtype == torch.int32
        assert block_table.stride(-1) == 1
        assert k.shape[1] % 256 == 0
    output = torch.full_like(q, float("nan"))
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(cu_seqlens_k.diff().tolist()):
        begin, end = starts[row], starts[row + 1]
        if block_table is None:
            first = int(cu_seqlens_k[row])
            keys, values = k[first : first + length], v[first : first + length]
        else:
            pages = block_table[row].long()
            keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
        output[begin:end] = attend(
            q[begin:end], keys, values, softmax_scale, causal, window_size, softcap
        )
    return output


def attend(query, keys, values, scale, causal, window_size, softcap):
    groups = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    left, right = window_size
    place = torch.arange(len(query))[:, None] + len(keys) - len(query)
    other = torch.arange(len(keys))[None]
    seen = torch.ones(len(query), len(keys), dtype=torch.bool)
    if causal:
        seen &= other <= place
    if left >= 0:
        seen &= other >= place - left
    if right >= 0:
        seen &= other <= place + right
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
