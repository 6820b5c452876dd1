"""The adapter from both layouts to varlen kernels, against plain arithmetic, shape by shape."""

from __future__ import annotations

from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from jackfield.contracts import BoundAttention, PackedLayer, PackedStep, PageTables, Span
from jackfield.errors import ExecutionError
from jackfield_plugins.attention.published import kernel_of, torch_varlen
from jackfield_plugins.attention.varlen import Rows, Scoring, VarlenKernel, bind_varlen
from jackfield_plugins.attention.varlen_probe import reference

HEADS, KV_HEADS, SIZE, WINDOW = 4, 2, 8, 3
CAUSAL = masking_utils.causal_mask_function
SLIDING = masking_utils.sliding_window_causal_mask_function(WINDOW)


class Metrics:
    """A kernel that computes the reference and remembers what it was given."""

    def __init__(self, page_multiple: int | None = None) -> None:
        self.calls: list[tuple[Rows, Scoring]] = []
        self.kernel = VarlenKernel(self.attend, frozenset(), page_multiple)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        scoring: Scoring,
    ) -> torch.Tensor:
        assert all(t.is_contiguous() for t in (query, keys, values))
        assert rows.cu_seqlens_q.dtype == rows.cu_seqlens_k.dtype == torch.int32
        assert 1 <= rows.cu_seqlens_q.diff().min() <= rows.cu_seqlens_q.diff().max()
        assert 1 <= rows.cu_seqlens_k.diff().min() <= rows.cu_seqlens_k.diff().max()
        assert rows.cu_seqlens_q.diff().max() <= rows.max_seqlen_q
        assert rows.cu_seqlens_k.diff().max() <= rows.max_seqlen_k
        if rows.max_seqlen_q == 1:
            assert len(query) == len(rows.cu_seqlens_q) - 1
        self.calls.append((rows, scoring))
        if rows.block_table is not None:
            table = rows.block_table.long()
            assert rows.seqused_k is not None
            assert rows.seqused_k.dtype == torch.int32
            lengths = rows.seqused_k.tolist()
            assert lengths == rows.cu_seqlens_k.diff().tolist()
            keys, values = (
                torch.cat([t[table[i]].flatten(0, 1)[:n] for i, n in enumerate(lengths)])
                for t in (keys, values)
            )
        found = reference(query, keys, values, rows, scoring)
        found[rows.cu_seqlens_q[-1] :] = float("nan")
        return found


def padded(metrics: Metrics, window: int | None = None) -> BoundAttention:
    return bind_varlen(metrics.kernel, [window])


def attend(bound: BoundAttention, mask: Any, *tensors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    module = SimpleNamespace(layer_idx=0, is_causal=True)
    output, weights = bound.forward(module, *tensors, mask, scaling=0.4, **kwargs)
    assert weights is None
    assert output.is_contiguous()
    return output


def step(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)]
    return tuple(
        torch.randn(batch, length, heads, SIZE, dtype=torch.float64).transpose(1, 2)
        for heads, length in shapes
    )


def by_columns(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention with a mask `[batch, queries, keys]`; rows that see nothing give zeros."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    scores = (query @ key.mT * 0.4).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def visible(valid: torch.Tensor, queries: int, window: int | None) -> torch.Tensor:
    """Which keys each query sees, `[batch, queries, keys]`; distances count valid tokens only."""
    place = valid.cumsum(1)
    ahead = place[:, -queries:, None] - place[:, None]
    seen = (ahead >= 0) & valid[:, None] & valid[:, -queries:, None]
    columns = torch.arange(valid.shape[1])
    seen &= columns[None, None] <= columns[-queries:][None, :, None]
    return seen if window is None else seen & (ahead < window)


MASKS = {
    "left": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]],
    "hole": [[0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 1]],
    "empty row": [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("queries", [6, 3, 2, 1])
@pytest.mark.parametrize("name", MASKS)
def test_padding_is_taken_out_and_put_back(name: str, queries: int, window: int | None) -> None:
    valid = torch.tensor(MASKS[name]).bool()
    metrics = Metrics()
    bound = padded(metrics, window)
    tensors = step(len(valid), queries, 6)
    mask = bound.mask(
        batch_size=len(valid), q_length=queries, kv_length=6, q_offset=6 - queries,
        mask_function=SLIDING if window else CAUSAL, attention_mask=valid,
    )  # fmt: skip
    assert mask is not None
    expected = by_columns(*tensors, visible(valid, queries, window))
    for tensor in tensors[1:]:  # what is hidden may be anything
        tensor.masked_fill_(~valid[:, None, :, None], float("nan"))
    found = attend(bound, mask, *tensors)
    torch.testing.assert_close(found, expected)
    assert (found[~valid[:, -queries:]] == 0).all()
    ((rows, scoring),) = metrics.calls
    assert scoring.window == window
    lengths = valid[:, -queries:].sum(1), valid.sum(1)
    found_lengths = rows.cu_seqlens_q.diff(), rows.cu_seqlens_k.diff()
    for due, had in zip(lengths, found_lengths, strict=True):  # a row of padding has one, too
        assert had.tolist() == due.clamp(min=1).tolist()


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 6), (4, 6)])
def test_without_padding_nothing_is_gathered(queries: int, keys: int, window: int | None) -> None:
    metrics = Metrics()
    bound = padded(metrics, window)
    tensors = step(2, queries, keys)
    everything = torch.ones(2, keys, dtype=torch.long)
    for given in (None, everything):
        mask = bound.mask(2, queries, keys, keys - queries, attention_mask=given)
        assert mask is None
        found = attend(bound, mask, *tensors)
        wanted = by_columns(*tensors, visible(everything.bool(), queries, window))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("offset", [3, torch.tensor(3)])
@pytest.mark.parametrize("length", [None, 5, 8])
def test_what_a_static_cache_has_not_written_is_not_seen(offset: Any, length: int | None) -> None:
    """Two queries at 3 and 4 of a cache of eight columns; the mask may end with them or not."""
    bound = padded(Metrics())
    query, key, value = step(2, 2, 8)
    valid = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]).bool()
    if length is None:
        valid[:, :5] = True
    mask = bound.mask(2, 2, 8, offset, attention_mask=None if length is None else valid[:, :length])
    assert mask is not None
    key[:, :, 5:] = value[:, :, 5:] = float("nan")
    found = attend(bound, mask, query, key, value)
    wanted = by_columns(query, key[:, :, :5], value[:, :, :5], visible(valid[:, :5], 2, None))
    torch.testing.assert_close(found, wanted)


def test_a_mask_made_ahead_goes_through_once_more_unchanged() -> None:
    """`generate` makes the mask of a static cache itself, and the model makes it again from it."""
    bound = padded(Metrics(), WINDOW)
    valid = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    place = {"q_length": 1, "kv_length": 3, "q_offset": 5, "kv_offset": 3}
    once = bound.mask(2, **place, mask_function=SLIDING, attention_mask=valid)
    assert once is not None
    assert once.tolist() == valid[:, 3:].tolist()
    twice = bound.mask(2, **place, mask_function=SLIDING, attention_mask=once)
    assert twice is not None
    assert twice.tolist() == once.tolist()


def test_layers_of_one_step_share_the_layout() -> None:
    bound = padded(metrics := Metrics())
    tensors = step(2, 2, 6)
    valid = torch.tensor(MASKS["left"][:2]).bool()
    mask = bound.mask(2, 2, 6, 4, attention_mask=valid)
    for _ in range(3):
        attend(bound, mask, *tensors)
    assert len({id(rows) for rows, _ in metrics.calls}) == 1
    attend(bound, mask.clone(), *tensors)
    assert len({id(rows) for rows, _ in metrics.calls}) == 2


PATTERNS = {
    "or": masking_utils.or_masks(CAUSAL, lambda b, h, q, k: q >= 0),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(2)),
    "documents": masking_utils.and_masks(
        CAUSAL, masking_utils.packed_sequence_mask_function(torch.zeros(2, 6))
    ),
    "both ways": masking_utils.bidirectional_mask_function,
    "wide": masking_utils.sliding_window_bidirectional_mask_function(WINDOW),
    "another": lambda b, h, q, k: k <= q,
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_that_rows_cannot_express_is_refused(name: str) -> None:
    bound = padded(Metrics())
    mask = bound.mask(2, 6, 6, mask_function=PATTERNS[name])
    with pytest.raises(ExecutionError, match="which this attention cannot express; choose another"):
        attend(bound, mask, *step(2, 6, 6))


def test_a_window_that_no_layer_has_is_refused() -> None:
    bound = padded(Metrics(), WINDOW + 1)
    mask = bound.mask(2, 6, 6, mask_function=SLIDING)
    with pytest.raises(ExecutionError, match="masks with a window of 3, which no layer's cache"):
        attend(bound, mask, *step(2, 6, 6))
    with pytest.raises(ExecutionError, match="asks for a window of 3, its cache for 4"):
        attend(padded(Metrics(), 4), None, *step(1, 2, 2), sliding_window=3)


def test_a_ready_made_mask_is_refused() -> None:
    with pytest.raises(ExecutionError, match="no ready-made mask of 4 dimensions"):
        attend(padded(Metrics()), torch.zeros(1, 1, 2, 2), *step(1, 2, 2))


def test_what_scores_need_reaches_the_kernel() -> None:
    metrics = Metrics()
    sinks = torch.zeros(HEADS)
    attend(padded(metrics), None, *step(1, 2, 2), softcap=2.0, s_aux=sinks, is_causal=False)
    ((_, scoring),) = metrics.calls
    assert scoring.sinks is sinks
    assert astuple(replace(scoring, sinks=None)) == (0.4, False, None, 2.0, None)


# Pages.


def pages(
    tables: list[list[int]], firsts: list[int], spans: list[Span], size: int, window: int | None
) -> PackedLayer:
    torch.manual_seed(0)
    pool = torch.randn(2, 12, size, KV_HEADS, SIZE, dtype=torch.float64)
    longest = max(map(len, tables))
    starts = [span.query_start for span in spans] + [spans[-1].query_start + spans[-1].query_len]
    packed = PackedStep(
        spans,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([span.kv_len for span in spans], dtype=torch.int32),
        max(span.query_len for span in spans),
        max(span.kv_len for span in spans),
    )
    table = torch.tensor([t + [0] * (longest - len(t)) for t in tables], dtype=torch.int32)
    first = torch.tensor(firsts, dtype=torch.int32)
    held = PageTables(packed, window, size, table, first, tables, firsts)
    return PackedLayer(pool[0], pool[1], held)


@pytest.mark.parametrize("multiple", [None, 2, 3])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_pages_are_gathered_or_read_in_place(multiple: int | None, window: int | None) -> None:
    """A prompt, a later chunk of another, a decode step; pages lie anyhow, old ones are gone."""
    firsts = [0, 2, 2] if window else [0, 0, 0]
    tables = [[3, 7], [9, 1, 2], [5, 11]] if window else [[3, 7], [8, 9, 1, 2], [10, 0, 5]]
    spans = [Span(0, 4, 4), Span(4, 3, 7), Span(7, 1, 6)]
    layer = pages(tables, firsts, spans, 2, window)
    torch.manual_seed(1)
    query = torch.randn(HEADS, 8, SIZE, dtype=torch.float64).transpose(0, 1)
    metrics = Metrics(multiple)
    bound = bind_varlen(metrics.kernel, [window])
    assert bound.packed is not None
    found = bound.packed(SimpleNamespace(layer_idx=0), query, layer, scaling=0.4)
    for row, span in enumerate(spans):
        keys, values = layer.gather(row)
        mask = layer.mask(row)
        seen = torch.ones(1, keys.shape[1], dtype=torch.bool) if mask is None else mask
        queries = query[span.query_start : span.query_start + span.query_len].transpose(0, 1)
        wanted = by_columns(queries[None], keys[None], values[None], seen[None])[0]
        torch.testing.assert_close(
            found[span.query_start : span.query_start + span.query_len], wanted
        )
    ((rows, scoring),) = metrics.calls
    assert (rows.block_table is layer.block_table) == (multiple == 2)
    assert astuple(scoring) == astuple(Scoring(0.4, True, window))
    bound.packed(SimpleNamespace(layer_idx=1), query, layer, scaling=0.4)
    assert metrics.calls[1][0] is rows


# Published signatures.


def test_torchs_own_kernel_gets_its_arguments() -> None:
    given: list[dict[str, Any]] = []

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,
    ):  # fmt: skip
        given.append({"window": window_size, "gqa": enable_gqa, "scale": scale, "used": seqused_k})
        return query

    kernel = torch_varlen(varlen_attn)
    assert kernel.features == {"grouped_query", "sliding_window"}
    assert kernel.page_multiple == 256
    query, keys = torch.zeros(4, 4, 8), torch.zeros(6, 2, 8)
    lengths = torch.tensor([0, 1, 4]).int(), torch.tensor([0, 2, 6]).int()
    kernel.attend(query, keys, keys, Rows(*lengths, 3, 4), Scoring(0.5))
    kernel.attend(query, keys[:, [0, 0, 1, 1]], keys, Rows(*lengths, 3, 4), Scoring(0.5, window=3))
    kernel.attend(query, keys, keys, Rows(*lengths, 3, 4), Scoring(0.5, causal=False))
    assert [(g["window"], g["gqa"]) for g in given] == [
        ((-1, 0), True), ((2, 0), False), ((-1, -1), True),
    ]  # fmt: skip
    table = torch.zeros(2, 1, dtype=torch.int32)
    paged = torch.zeros(1, 256, 2, 8)
    used = torch.tensor([2, 4]).int()
    kernel.attend(query, paged, paged, Rows(*lengths, 3, 4, table, used), Scoring(0.5))
    assert given[-1]["used"] is used
    assert given[-1]["gqa"]


@pytest.mark.parametrize(
    ("longest_q", "longest_k", "scoring", "window"),
    [
        (1, 9, Scoring(), (-1, -1)),
        (1, 9, Scoring(window=10), (-1, -1)),
        (1, 9, Scoring(window=9), (-1, -1)),
        (1, 9, Scoring(window=8), (7, 0)),
        (2, 9, Scoring(), (-1, 0)),
        (2, 9, Scoring(window=9), (-1, 0)),
        (2, 9, Scoring(window=8), (7, 0)),
        (2, 9, Scoring(causal=False), (-1, -1)),
    ],
)
def test_torchs_kernel_gets_a_window_only_where_it_changes_something(
    longest_q: int, longest_k: int, scoring: Scoring, window: tuple[int, int]
) -> None:
    given: list[Any] = []

    def varlen_attn(*args, scale, window_size, block_table=None, seqused_k=None):
        given.append(window_size)
        return args[0]

    tensors = [torch.zeros(2, 4, 8)] * 3
    starts = torch.tensor([0, 1, 2]).int()
    rows = Rows(starts, starts, longest_q, longest_k)
    torch_varlen(varlen_attn).attend(*tensors, rows, scoring)
    assert given == [window]


def test_the_first_of_a_tuple_is_the_output() -> None:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=None, causal=False, page_table=None, learnable_sink=None,
    ):  # fmt: skip
        return q + 1, "lse"

    kernel = kernel_of(flash_attn_varlen_func)
    assert kernel.features == {"grouped_query", "sinks"}
    assert kernel.page_multiple == 256
    lengths = torch.tensor([0, 2]).int()
    query = torch.zeros(2, 4, 8)
    found = kernel.attend(query, query, query, Rows(lengths, lengths, 2, 2), Scoring(0.5))
    assert (found == 1).all()
