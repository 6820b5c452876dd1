"""`flash_attention_varlen` as metal-flash-sdpa first published it, in plain torch: writes to `out`.

Like the real one it reads memory as if it were contiguous, so strided keys come out as garbage.
"""

import torch

HEAD_SIZES = (32, 64, 72, 80, 96, 128, 256)
calls = []


def flash_attention_varlen(
    out,
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    do_causal,
    scale,
    softcapping,
):
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError(f"Unsupported dtype for flash attention: {query.dtype}")
    if query.shape[-1] not in HEAD_SIZES:
        raise RuntimeError(f"Head dimension {query.shape[-1]} is not supported")
    assert out.shape == query.shape
    assert out.is_contiguous()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    assert type(do_causal) is bool
    assert type(scale) is type(softcapping) is float
    calls.append({"softcapping": softcapping, "max_seqlen_q": max_seqlen_q})
    query, key, value = (as_it_lies(t) for t in (query, key, value))
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(starts_q) - 1):
        rows = slice(starts_q[row], starts_q[row + 1])
        q = query[rows]
        k, v = (t[starts_k[row] : starts_k[row + 1]] for t in (key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcapping != 1.0:
            scores = torch.tanh(scores / softcapping) * softcapping
        if do_causal:
            place = torch.arange(len(q))[:, None] + len(k) - len(q)
            scores = scores.masked_fill(torch.arange(len(k))[None] > place, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def as_it_lies(tensor):
    """The tensor that a kernel without strides sees from its first element on."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())
