"""Packed steps made up for tests and benchmarks, and the plain reference that they are held to."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch

from jackfield.contracts import Blocks, PackedLayer, PackedStep, PageTables, Span


def step_of(sizes: Seq[tuple[int, int]], device: str = "cpu") -> PackedStep:
    """A step from (queries, tokens with these) of each sequence."""
    starts = [0]
    for queries, _ in sizes:
        starts.append(starts[-1] + queries)
    return PackedStep(
        [Span(at, queries, end) for at, (queries, end) in zip(starts, sizes, strict=False)],
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([end for _, end in sizes], dtype=torch.int32, device=device),
        max(queries for queries, _ in sizes),
        max(end for _, end in sizes),
    )


def layer_of(
    step: PackedStep,
    *,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    page_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    stale: float = float("nan"),
    seed: int = 0,
    block: int | None = None,
) -> PackedLayer:
    """Random keys and values in pages that lie in no order; other slots hold `stale`.

    Pages before the window are given back, so that tables do not begin with the first token. Tokens
    of every other sequence with several queries lie in blocks of `block`, one between two of them.
    """
    firsts = [
        0
        if window is None
        else max(0, s.kv_len - s.query_len + 1 - window) // page_size * page_size
        for s in step.spans
    ]
    counts = [-(-(s.kv_len - f) // page_size) for s, f in zip(step.spans, firsts, strict=True)]
    total = sum(counts) + 3
    order = random.Random(seed).sample(range(total), total)
    tables = [[order.pop() for _ in range(count)] for count in counts]
    padded = [table + [0] * (max(counts) - len(table)) for table in tables]
    generator = torch.Generator(device).manual_seed(seed)
    live = torch.zeros(total, page_size, dtype=torch.bool)
    for span, first, table in zip(step.spans, firsts, tables, strict=True):
        for at in range(first, span.kv_len, page_size):
            live[table[(at - first) // page_size], : span.kv_len - at] = True

    def pool(dim: int) -> torch.Tensor:
        shape = (total, page_size, kv_heads, dim)
        made = torch.randn(shape, generator=generator, device=device).to(dtype)
        return made.masked_fill_(~live.to(device)[..., None, None], stale)

    held = PageTables(
        step, window, page_size,
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
        tables, firsts, blocks=None if block is None else _blocks_of(step, block, device),
    )  # fmt: skip
    return PackedLayer(pool(head_dim), pool(value_dim or head_dim), held)


def _blocks_of(step: PackedStep, size: int, device: str) -> Blocks | None:
    """The first block of a sequence may have begun before its first query; None: there is none."""
    of, ends = [], []
    for row, span in enumerate(step.spans):
        first = span.kv_len - span.query_len
        begins = range(max(1, first - 1), span.kv_len - 1, size + 1)
        single = span.query_len == 1 or row % 2
        of.append([] if single else [(at, min(at + size, span.kv_len)) for at in begins])
        own = list(range(first + 1, span.kv_len + 1))
        for begin, end in of[-1]:
            at = max(begin, first) - first
            own[at : end - first] = [end] * (end - first - at)
        ends += own
    if not any(of):
        return None
    return Blocks(torch.tensor(ends, dtype=torch.int32, device=device), of)


def queries_of(step: PackedStep, heads: int, layer: PackedLayer, seed: int = 1) -> torch.Tensor:
    """Random `[tokens, heads, head_dim]`, a view of `[heads, tokens, …]` as models hand it over."""
    keys = layer.keys
    generator = torch.Generator(keys.device).manual_seed(seed)
    shape = (heads, step.spans[-1].query_start + step.spans[-1].query_len, keys.shape[3])
    made = torch.randn(shape, generator=generator, device=keys.device)
    return made.to(keys.dtype).transpose(0, 1)


def reference(
    query: torch.Tensor,
    layer: PackedLayer,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """What attention means, written out one sequence at a time: `[tokens, heads, value_dim]`.

    Every step is rounded to `dtype`: float64 is the truth, another dtype shows what it costs.
    """
    rows = []
    for row, span in enumerate(layer.step.spans):
        slots = [
            layer.tables.tables[row][at // layer.page_size] * layer.page_size + at % layer.page_size
            for at in range(span.kv_len - layer.tables.firsts[row])
        ]
        group = query.shape[1] // layer.keys.shape[2]
        keys, values = (
            pool.flatten(0, 1)[slots].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
            for pool in (layer.keys, layer.values)
        )
        q = query[span.query_start : span.query_start + span.query_len].to(dtype).transpose(0, 1)
        scores = q @ keys.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(layer.tables.firsts[row], span.kv_len, device=q.device)
        mine = at[-span.query_len :, None]
        ends = layer.ends(row)
        seen = at <= mine if ends is None else at < ends
        if layer.window is not None:
            seen &= at > mine - layer.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand_as(q[..., :1])], -1)
        weights = scores.softmax(-1)[..., : len(slots)]
        rows.append((weights @ values).transpose(0, 1))
    return torch.cat(rows)
