"""Wrong attentions: what an honest author gets wrong, and what no author should do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import right_attention as right
import torch
from mutation import mutants
from right_attention import FEATURES, given
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from wrong import Wrong

from jackfield.contracts import Attention, AttentionCapabilities, BoundAttention
from jackfield_plugins.attention.cpu_decode import CpuDecodeAttention

PLAIN = frozenset({"grouped_query", "sliding_window"})
BLOCKS = PLAIN | {"bidirectional_blocks"}
NARROW = frozenset({"float32"})


class StaleTables(CpuDecodeAttention):
    """Its calls go on with the tables of the step that they were made in."""

    name = "wrong"

    def bind(self, context: Any) -> Any:
        return dataclasses.replace(super().bind(context), native_again=lambda tables: True)


def of(
    forward: Any = None, mask: Any = None, packed: Any = None, features: Any = FEATURES,
    layouts: Any = ("padded", "packed"), **more: Any,
) -> Callable[[], Attention]:  # fmt: skip
    """A right attention with other functions; `more` are capabilities."""
    has = more.pop("has", {})

    class Wronged(Attention):
        name = "wrong"
        capabilities = AttentionCapabilities(
            layouts=frozenset(layouts), devices=frozenset({"cpu"}), features=features, **more
        )

        def bind(self, context: Any) -> Any:
            return BoundAttention(
                forward or right.forward, mask or right.mask, packed or right.packed
            )

    for name, member in has.items():
        setattr(Wronged, name, member)
    return Wronged


def attending(attend: Callable[..., Any], **more: Any) -> Callable[[], Attention]:
    """Another formula, in both layouts: `attend(right, query, key, value, mask, **given)`."""

    def changed(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            before = right.attend
            right.attend = functools.partial(attend, before)  # type: ignore[assignment]
            try:
                return function(*args, **kwargs)
            finally:
                right.attend = before

        return called

    return of(changed(right.forward), None, changed(right.packed), **more)


def keyed(**change: Any) -> Callable[[], Attention]:
    """Keyword arguments changed: name -> function of the right value and the query."""

    def attend(inner: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        for name, other in change.items():
            if kwargs[name] is not None:
                kwargs[name] = other(kwargs[name], query)
        return inner(query, key, value, mask, **kwargs)

    return attending(attend)


def tensors(change: Callable[..., Any], **more: Any) -> Callable[[], Attention]:
    """Query, key, value and mask changed."""
    return attending(lambda inner, q, k, v, m, **kw: inner(*change(q, k, v, m), **kw), **more)


def output(change: Callable[[Any], Any], **more: Any) -> Callable[[], Attention]:
    """`[rows, heads, queries, size]`, changed."""
    return attending(lambda inner, *args, **kw: change(inner(*args, **kw)), **more)


def packs(packed: Callable[..., Any], **more: Any) -> Callable[[], Attention]:
    more.setdefault("features", PLAIN)
    return of(None, None, packed, **more)


def pads(forward: Callable[..., Any], **more: Any) -> Callable[[], Attention]:
    return of(forward, layouts=("padded",), **more)


def masks(mask: Callable[..., Any], **more: Any) -> Callable[[], Attention]:
    return of(None, mask, layouts=("padded",), **more)


def _scores_softcapped(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
    if kw["softcap"] is not None:  # cap * tanh(scores / cap), and scaled behind that
        kw["softcap"] = kw["softcap"] * kw["scaling"]
    return inner(q, k, v, m, **kw)


def _up_to(count: int) -> Callable[..., Any]:
    """A scratch of so many scores in decode."""

    def attend(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
        if q.shape[2] == 1:
            k, v, m = k[:, :, :count], v[:, :, :count], m if m is None else m[..., :count]
        return inner(q, k, v, m, **kw)

    return attend


def _in_blocks(*, sums: bool, outputs: bool) -> Callable[..., Any]:
    """Softmax block by block, in which `sums` or `outputs` are rescaled, or not."""

    def attend(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
        if kw["softcap"] is not None or kw["s_aux"] is not None or kw["position_bias"] is not None:
            return inner(q, k, v, m, **kw)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q.float() @ k.float().transpose(2, 3) * kw["scaling"]
        if m is not None:
            seen = m if m.dtype == torch.bool else m > -1e4
            scores = scores.masked_fill(~seen, -1e30)
        largest = torch.full_like(scores[..., :1], -1e30)
        total, mixed = torch.zeros_like(largest), q.new_zeros(*q.shape[:3], v.shape[3]).float()
        for at in range(0, scores.shape[3], 64):
            own = scores[..., at : at + 64]
            new = torch.maximum(largest, own.amax(3, keepdim=True))
            weights, before = (own - new).exp(), (largest - new).exp()
            weights = weights.masked_fill(own < -1e29, 0.0)
            total = total * (before if sums else 1.0) + weights.sum(3, keepdim=True)
            mixed = mixed * (before if outputs else 1.0) + weights @ v[:, :, at : at + 64].float()
            largest = new
        return (mixed / total.clamp(min=1e-30)).to(q.dtype)

    return attend


def _mask_by_shape() -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def mask(**kwargs: Any) -> Any:
        made = right.mask(**kwargs)
        return kept.setdefault((made.shape, int(kwargs["q_offset"])), made)

    return mask


def _last_of_window(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    window = kw.get("sliding_window")
    if window is not None and query.shape[2] == 1:
        key, value, mask = key[:, :, -window:], value[:, :, -window:], mask[..., -window:]
        value = value * mask.any()
    return right.forward(module, query, key, value, mask, **kw)


def _plan_of_a_step() -> Callable[..., Any]:
    """Page tables by what a step looks like."""
    kept: dict[Any, Any] = {}

    def packed(module: Any, query: Any, layer: Any, **kwargs: Any) -> Any:
        lengths = tuple(span.kv_len for span in layer.step.spans)
        tables = kept.setdefault((len(query), lengths, layer.page_size), [layer.tables.tables, 0])
        tables[1] += 1
        own, mine = layer.tables.tables, tables[0]
        if tables[1] % 2:  # made anew every other time
            tables[0] = mine = own
        layer.tables.tables = mine
        try:
            return right.packed(module, query, layer, **kwargs)
        finally:
            layer.tables.tables = own

    return packed


def _in_turn(q: Any, k: Any, v: Any, m: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    return q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), m


def _untransposed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    out = right.attend(query, key, value, mask, **given(kw))
    rows, heads, queries, size = out.shape
    return out.reshape(rows, queries, heads, size), None


def _raw(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    return right.attend(query, key, value, mask, **given(kw)), None


def _view(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    return right.attend(query, key, value, mask, **given(kw)).transpose(1, 2), None


def _where_heads_are_queries(*args: Any, **kw: Any) -> Any:
    query = args[1]
    turn = query.shape[1] == query.shape[2]
    return (_untransposed if turn else right.forward)(*args, **kw)


def _no_softmax_shift(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
    if kw["s_aux"] is not None or kw["softcap"] is not None or kw["position_bias"] is not None:
        return inner(q, k, v, m, **kw)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = (q @ k.transpose(2, 3) * kw["scaling"]).exp()
    if m is not None:
        weights = weights * m if m.dtype == torch.bool else weights * m.exp()
    return (weights / (weights.sum(3, keepdim=True) + 1e-9)) @ v


def _softmax_of_queries(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * kw["scaling"]
    if m is not None and m.dtype == torch.bool:
        scores = scores.masked_fill(~m, -1e30)
    return scores.softmax(2) @ v


def _in_place(q: Any, k: Any, v: Any, m: Any) -> Any:
    q *= 1.0000001
    return q, k, v, m


def _values_in_place(q: Any, k: Any, v: Any, m: Any) -> Any:
    v.nan_to_num_().clamp_(-3, 3)
    return q, k, v, m


def _mask_in_place(q: Any, k: Any, v: Any, m: Any) -> Any:
    if m is not None and m.dtype == torch.bool:
        m[:] = m.clone()
        m.untyped_storage()[0] = 1 - m.untyped_storage()[0]
    return q, k, v, m


def _torch_causal(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    group = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1),
        is_causal=query.shape[2] > 1, scale=kw["scaling"],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _forwards_only(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    """An encoder's tokens, too, see only those before them."""
    if not module.is_causal:
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(queries, keys).bool().tril(keys - queries)[None, None]
    return right.forward(module, query, key, value, mask, **kw)


def _all_of_an_encoder(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    """What an encoder said is seen with its padding."""
    seen = mask if module.is_causal else None
    return right.forward(module, query, key, value, seen, **kw)


def _nan_rows(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
    if m is not None and m.dtype == torch.bool:
        m = torch.where(m, 0.0, float("-inf")).to(q.dtype)
    return inner(q, k, v, m, **kw)


class Buffered:
    """Writes its output into one piece of memory for each shape."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kw: Any) -> Any:
        out, _ = right.forward(*args, **kw)
        with torch.inference_mode():
            own = self.kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
            own.copy_(out)
        return own, None


class First:
    """Gives what it gave first, for each shape."""

    def __init__(self, function: Any) -> None:
        self.function, self.kept = function, {}

    def __call__(self, *args: Any, **kw: Any) -> Any:
        key = args[1].shape, args[2].shape if isinstance(args[2], torch.Tensor) else 0
        if key not in self.kept:
            self.kept[key] = self.function(*args, **kw)
        return self.kept[key]


class MaskOnce:
    """One mask for each shape, for ever."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __call__(self, **kw: Any) -> Any:
        key = kw["batch_size"], kw["q_length"], kw["kv_length"]
        if key not in self.kept:
            self.kept[key] = right.mask(**kw)
        return self.kept[key]


def _mask_without(*names: str) -> Any:
    def mask(**kw: Any) -> Any:
        for name in names:
            kw.pop(name, None)
        return right.mask(**kw)

    return mask


def _own_causality(**kw: Any) -> Any:
    kw["mask_function"] = causal_mask_function
    return right.mask(**kw)


def _never(**kw: Any) -> Any:
    return None


def _skips(**kw: Any) -> Any:
    """sdpa's mask, which is None where torch's is_causal would do; forward does not do it."""
    return sdpa_mask(**kw)


def _right_padding(**kw: Any) -> Any:
    if kw["attention_mask"] is not None:
        kw["attention_mask"] = kw["attention_mask"].flip(1)
    return right.mask(**kw)


def _padding_of_row_0(**kw: Any) -> Any:
    if kw["attention_mask"] is not None:
        kw["attention_mask"] = kw["attention_mask"][:1].expand_as(kw["attention_mask"])
    return right.mask(**kw)


def _one_more(seen: bool) -> Any:
    """A mask that is shifted by a key."""

    def mask(**kw: Any) -> Any:
        made = right.mask(**kw)
        moved = torch.roll(made, 1 if seen else -1, 3)
        return made | moved if seen else made & moved

    return mask


def rows_of(
    change: Callable[..., Any] = lambda seen, layer, row, span: seen,
    keys: Callable[..., Any] = right.keys_of,
    order: Callable[[Any], Any] = lambda rows: rows,
) -> Any:
    """The right packed attention, with another mask, other keys, or rows in another order."""

    def packed(module: Any, query: Any, layer: Any, **kwargs: Any) -> Any:
        rows = []
        for row, span in enumerate(layer.step.spans):
            key, value = keys(layer, row, span)
            queries = query[span.query_start : span.query_start + span.query_len]
            at = torch.arange(layer.tables.firsts[row], span.kv_len)
            mine = at[-span.query_len :, None]
            seen = at <= mine
            if layer.window is not None:
                seen = seen & (at > mine - layer.window)
            seen = change(seen, layer, row, span)
            out = right.attend(
                queries.transpose(0, 1)[None], key[None], value[None],
                None if seen is None else seen[None, None], **given(kwargs),
            )  # fmt: skip
            rows.append(out[0].transpose(0, 1))
        return torch.cat(order(rows))

    return packed


def _positions(layer: Any, row: int, span: Any) -> Any:
    at = torch.arange(layer.tables.firsts[row], span.kv_len)
    return at, at[-span.query_len :, None]


def _all(seen: Any, layer: Any, row: int, span: Any) -> Any:
    return torch.ones_like(seen)


def _no_window(seen: Any, layer: Any, row: int, span: Any) -> Any:
    at, mine = _positions(layer, row, span)
    return at <= mine


def _window(by: int) -> Any:
    def change(seen: Any, layer: Any, row: int, span: Any) -> Any:
        at, mine = _positions(layer, row, span)
        window = layer.window
        return seen if window is None else (at <= mine) & (at > mine - window - by)

    return change


def _top_left(seen: Any, layer: Any, row: int, span: Any) -> Any:
    return torch.arange(seen.shape[1]) <= torch.arange(seen.shape[0])[:, None]


def _strictly(seen: Any, layer: Any, row: int, span: Any) -> Any:
    at, mine = _positions(layer, row, span)
    return seen & ((at < mine) | (at == 0))


def _ends(layer: Any, row: int, span: Any) -> Any:
    """Behind which key each query of a sequence sees nothing, `[queries, 1]`."""
    if layer.tables.blocks is None:
        return _positions(layer, row, span)[1] + 1
    return layer.tables.blocks.ends[span.query_start : span.query_start + span.query_len, None]


def _whole_blocks(seen: Any, layer: Any, row: int, span: Any) -> Any:
    """All of a block, also what is before a window."""
    at, mine = _positions(layer, row, span)
    seen = seen | ((at > mine) & (at < _ends(layer, row, span)))
    for begin, end in () if layer.tables.blocks is None else layer.tables.blocks.of[row]:
        seen |= (at >= begin) & (at < end) & (mine >= begin) & (mine < end)
    return seen


def _blocks_of_row_0(seen: Any, layer: Any, row: int, span: Any) -> Any:
    if layer.tables.blocks is None or not layer.tables.blocks.of[row]:
        return seen
    at, mine = _positions(layer, row, span)
    ends = layer.tables.blocks.ends[: span.query_len, None]
    inside = at > mine - (layer.window or span.kv_len + 1)
    return (at < ends.maximum(mine + 1)) & inside


def _on_from_blocks(seen: Any, layer: Any, row: int, span: Any) -> Any:
    at, mine = _positions(layer, row, span)
    return seen | ((at > mine) & (_ends(layer, row, span) > mine + 1))


def _window_of_kwargs(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    window = kw.get("sliding_window")

    def change(seen: Any, layer: Any, row: int, span: Any) -> Any:
        at, mine = _positions(layer, row, span)
        return (at <= mine) if window is None else (at <= mine) & (at > mine - window)

    return rows_of(change)(module, query, layer, **kw)


def _cut(keys: Any, count: int) -> Any:
    return tuple(states[:, :count] for states in keys)


def _in_a_row(layer: Any, row: int, span: Any) -> Any:
    start = layer.tables.tables[row][0] * layer.page_size
    count = span.kv_len - layer.tables.firsts[row]
    pools = layer.flat_keys, layer.flat_values
    at = (start + torch.arange(count)) % len(pools[0])
    return tuple(pool[at].transpose(0, 1) for pool in pools)


def _first_forgotten(layer: Any, row: int, span: Any) -> Any:
    """The table read as if it began with the first token."""
    pages = layer.tables.tables[row]
    begin = layer.tables.firsts[row]
    found = []
    for pool in (layer.keys, layer.values):
        whole = torch.cat([pool[page] for page in pages]).transpose(0, 1)
        count = span.kv_len - begin
        found.append(torch.roll(whole, begin and 1, 1)[:, :count])
    return tuple(found)


def _zeros_for_the_rest(layer: Any, row: int, span: Any) -> Any:
    """The last page, where it is not full, is not read."""
    keys = right.keys_of(layer, row, span)
    whole = keys[0].shape[1] // layer.page_size * layer.page_size
    for states in keys:
        if whole:
            states[:, whole:] = 0
    return keys


def _pages_of_row_0(layer: Any, row: int, span: Any) -> Any:
    pages = (layer.tables.tables[0] * 99)[: len(layer.tables.tables[row])]
    count = span.kv_len - layer.tables.firsts[row]
    pools = layer.keys, layer.values
    return tuple(torch.cat([p[page] for page in pages])[:count].transpose(0, 1) for p in pools)


def _far(limit: int) -> Any:
    def keys(layer: Any, row: int, span: Any) -> Any:
        found = right.keys_of(layer, row, span)
        for states in found:
            states[:, limit:] = 0
        return found

    return keys


class Gathered:
    """Keys gathered once for the tables that layers share, or for the layer."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self.key, self.kept = key, {}

    def __call__(self, layer: Any, row: int, span: Any) -> Any:
        key = self.key(layer), row, span
        if key not in self.kept:
            self.kept[key] = (layer, right.keys_of(layer, row, span))
        return self.kept[key][1]


class MaskOfStep:
    """What a row sees, worked out once a step, whatever the layer's window."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __call__(self, seen: Any, layer: Any, row: int, span: Any) -> Any:
        key = id(layer.step), row, span
        known = self.kept.setdefault(key, (layer.step, seen))[1]
        return known if known.shape == seen.shape else seen


def _writes_pages(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    layer.keys.nan_to_num_()
    return right.packed(module, query, layer, **kw)


def _sorts_tables(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    out = right.packed(module, query, layer, **kw)
    layer.tables.tables[0].sort(reverse=True)
    layer.tables.block_table[0] += 1
    return out


def _by_batch(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    out = right.packed(module, query, layer, **kw)
    return out * (1 + 2e-6 * (len(layer.step.spans) - 1)) if out.dtype == torch.float32 else out


def _by_shared_maximum(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    out = right.packed(module, query, layer, **kw)
    return (out + out.abs().max()) - out.abs().max()


def _reads_nan(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    """Pages gathered whole, weights of what is not there 0; but 0 times NaN is NaN."""
    rows = []
    for row, span in enumerate(layer.step.spans):
        table = layer.block_table[row].long()
        keys, values = (p[table].flatten(0, 1).transpose(0, 1) for p in (layer.keys, layer.values))
        at = layer.tables.firsts[row] + torch.arange(keys.shape[1])
        mine = torch.arange(span.kv_len - span.query_len, span.kv_len)[:, None]
        seen = at <= mine
        if layer.window is not None:
            seen = seen & (at > mine - layer.window)
        queries = query[span.query_start : span.query_start + span.query_len].transpose(0, 1)
        out = right.attend(queries[None], keys[None], values[None], seen[None, None], **given(kw))
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


def _decodes_wrongly(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    """The last query of each sequence alone, for all of them."""
    out = right.packed(module, query, layer, **kw)
    for span in layer.step.spans:
        end = span.query_start + span.query_len
        if span.query_len < span.kv_len:
            out[span.query_start : end] = out[end - 1]
    return out


def _waits(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    lengths = layer.step.seq_lens.tolist()
    rows = []
    for row, count in enumerate(lengths):
        table = layer.block_table[row].long()
        keys, values = (p[table].flatten(0, 1) for p in (layer.keys, layer.values))
        first = int(layer.first[row])
        begin = 0 if layer.window is None else max(0, count - layer.window - first)
        span = slice(begin, count - first)
        out = right.attend(query[row][None, :, None], keys[span].transpose(0, 1)[None],
                           values[span].transpose(0, 1)[None], None, **given(kw))  # fmt: skip
        rows.append(out[:, :, 0])
    return (
        torch.cat(rows)
        if layer.step.max_seqlen_q == 1
        else right.packed(module, query, layer, **kw)
    )


def _leaves(change: Callable[[], Any]) -> Any:
    def forward(*args: Any, **kw: Any) -> Any:
        found = right.forward(*args, **kw)
        change()
        return found

    return pads(forward)


def _detached(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    with torch.no_grad():
        return right.forward(module, query, key, value, mask, **kw)


def _keys_detached(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
    return right.forward(module, query, key.detach() * 1.0, value, mask, **kw)


def _records() -> Any:
    """Keeps 1,500 bytes of each call for ever, in blocks of 256 calls."""
    count = itertools.count()
    blocks: list[bytearray] = []

    def packed(*args: Any, **kw: Any) -> Any:
        if next(count) % 256 == 0:
            blocks.append(bytearray(256 * 1500))
        return right.packed(*args, **kw)

    return packed


def _by_layer() -> Any:
    kept: dict[int, Any] = {}

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
        scale = kept.setdefault(module.layer_idx, kw["scaling"])
        return right.forward(module, query, key, value, mask, **{**kw, "scaling": scale})

    return forward


def _long_keys(limit: int) -> Any:
    return tensors(lambda q, k, v, m: (
        q, k[:, :, -limit:], v[:, :, -limit:], None if m is None else m[..., -limit:]
    ))  # fmt: skip


def _few_heads(most: int) -> Callable[..., Any]:
    """Scratch for so many heads; those behind stay 0."""

    def change(out: Any) -> Any:
        out = out.clone()
        out[:, most:] = 0
        return out

    return change


def _groups_in_shifts(q: Any, k: Any, v: Any, m: Any) -> Any:
    """The key head of a query head by a shift of bits, which only groups of 1, 2, 4, … have."""
    own = k.shape[1]
    bits = max(0, (q.shape[1] // own).bit_length() - 1)
    at = (torch.arange(q.shape[1]) >> bits).clamp(max=own - 1)
    return q, k[:, at], v[:, at], m


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _scores_by_powers(q: Any, k: Any, v: Any, m: Any) -> Any:
    """Tiles as wide as the power of two below the size of a head, from 64 on."""
    size = _power_of_two(q.shape[3]) if q.shape[3] > 64 else q.shape[3]
    return q[..., :size], k[..., :size], v, m


def _values_by_powers(inner: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
    out = inner(q, k, v, m, **kw)
    if v.shape[3] > 64:
        out[..., _power_of_two(v.shape[3]) :] = 0
    return out


def _window_at_most(most: int) -> Any:
    """Keys that a ring of so many places holds."""

    def change(seen: Any, layer: Any, row: int, span: Any) -> Any:
        if layer.window is None or layer.window <= most:
            return seen
        at, mine = _positions(layer, row, span)
        return seen & (at > mine - most)

    return change


def _padded_window_at_most(most: int) -> Any:
    def forward(module: Any, q: Any, k: Any, v: Any, m: Any, **kw: Any) -> Any:
        if (kw.get("sliding_window") or 0) > most:
            back = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
            m = m & (torch.arange(k.shape[2]) > back - most)
        return right.forward(module, q, k, v, m, **kw)

    return forward


def _window_of_config(seen: Any, layer: Any, row: int, span: Any) -> Any:
    """The model's window, in layers that have none too."""
    at, mine = _positions(layer, row, span)
    return seen & (at > mine - 4)


def _by_length(module: Any, query: Any, layer: Any, **kw: Any) -> Any:
    """Page tables found by the length of a sequence."""
    tables = layer.tables.tables
    known = {s.kv_len: pages for s, pages in zip(layer.step.spans, tables, strict=True)}
    layer.tables.tables = [known[span.kv_len] for span in layer.step.spans]
    try:
        return right.packed(module, query, layer, **kw)
    finally:
        layer.tables.tables = tables


def _ordered(order: Callable[[Any], Any]) -> Any:
    """The pages of each sequence in another order."""

    def keys(layer: Any, row: int, span: Any) -> Any:
        count = span.kv_len - layer.tables.firsts[row]
        pages = order(layer.tables.tables[row])
        pools = layer.keys, layer.values
        return tuple(torch.cat([p[page] for page in pages])[:count].transpose(0, 1) for p in pools)

    return keys


def _window_in_decode(by: int) -> Any:
    """A window that is off by some keys where one query is asked, in pages."""
    change = _window(by)

    def changed(seen: Any, layer: Any, row: int, span: Any) -> Any:
        return change(seen, layer, row, span) if span.query_len == 1 else seen

    return changed


def _padded_window(by: int) -> Any:
    def mask(**kw: Any) -> Any:
        size = kw.get("local_size")
        if size and kw["mask_function"] is not causal_mask_function:
            kw["mask_function"] = sliding_window_causal_mask_function(size + by)
        return right.mask(**kw)

    return mask


def _accepts(self: Any, requirements: Any, options: Any) -> list[str]:
    return []


def _only_features(self: Any, requirements: Any, options: Any) -> list[str]:
    lacks = requirements.features.keys() - self.capabilities.features
    return [f"does not have {name}" for name in lacks]


BY_HAND: tuple[Wrong, ...] = (
    Wrong("no scaling", keyed(scaling=lambda s, q: 1.0), "not scaled"),
    Wrong("its own scaling", keyed(scaling=lambda s, q: q.shape[3] ** -0.5), "head_dim"),
    Wrong("scaled twice", keyed(scaling=lambda s, q: s * s), "scaled twice"),
    Wrong("scaled by both", keyed(scaling=lambda s, q: s * q.shape[3] ** -0.5), "too"),
    Wrong("divided by scaling", keyed(scaling=lambda s, q: 1 / s), "divided"),
    Wrong("scaled for ever as at first", pads(_by_layer()), "scal|off by"),
    Wrong("no softcap", keyed(softcap=lambda c, q: None), "softcap is ignored"),
    Wrong("softcap before scaling", attending(_scores_softcapped), "softcap"),
    Wrong("softcap twice as high", keyed(softcap=lambda c, q: 2 * c), "off by"),
    Wrong("no sinks", keyed(s_aux=lambda s, q: None), "sinks are ignored"),
    Wrong("sinks of 0", keyed(s_aux=lambda s, q: torch.zeros_like(s)), "sink of 0"),
    Wrong("sinks scaled", keyed(s_aux=lambda s, q: s * 0.41), "sinks are scaled"),
    Wrong("sinks in reverse", keyed(s_aux=lambda s, q: s.flip(0)), "reverse"),
    Wrong("no position bias", keyed(position_bias=lambda b, q: None), "bias is ignored"),
    Wrong("position bias scaled", keyed(position_bias=lambda b, q: b * 0.41), "bias is scaled"),
    Wrong("position bias of one head",
          keyed(position_bias=lambda b, q: b[:, :1].expand_as(b)), "bias of head 0"),
    Wrong("an encoder that reads forwards", pads(_forwards_only), "that an encoder read"),
    Wrong("an encoder's padding is seen", pads(_all_of_an_encoder), "that an encoder read"),
    Wrong("heads in turn", tensors(_in_turn), "in turn"),
    Wrong("one key head", tensors(lambda q, k, v, m: (q, k[:, :1], v[:, :1], m)), "key head 0"),
    Wrong("keys for values", tensors(lambda q, k, v, m: (
        q, v if k.shape == v.shape else k, k if k.shape == v.shape else v, m)), "exchanged"),
    Wrong("softmax over queries", attending(_softmax_of_queries), "off by|NaN|finite"),
    Wrong("no largest score subtracted", attending(_no_softmax_shift), "largest score|NaN"),
    Wrong("in bfloat16", attending(lambda inner, q, k, v, m, **kw: inner(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), m, **kw).to(q.dtype)), "off by|changes"),
    Wrong("queries in float16", tensors(lambda q, k, v, m: (q.half().to(q.dtype), k, v, m)),
          "off by"),
    Wrong("not transposed", pads(_raw), "transposed"),
    Wrong("reshaped, not transposed", pads(_untransposed), "not transposed"),
    Wrong("reshaped where queries are as many as heads", pads(_where_heads_are_queries),
          "not transposed"),
    Wrong("a view", pads(_view), "contiguous"),
    Wrong("heads in reverse", output(lambda out: out.flip(1)), "heads are in reverse"),
    Wrong("queries in reverse", output(lambda out: out.flip(2)), "reverse order"),
    Wrong("all 0", output(torch.zeros_like), "all 0"),
    Wrong("a third of it", output(lambda out: out / 3), "off by"),
    Wrong("wider numbers", output(lambda out: out.double()), "float64"),
    Wrong("infinite for large ones", output(
        lambda out: torch.where(out.abs() > 2.5, float("inf"), out)), "finite|inf"),
    Wrong("ignores the mask", tensors(lambda q, k, v, m: (q, k, v, None)),
          "masked|later|padding"),
    Wrong("torch's own causality", pads(_torch_causal), "counts from the first|padding"),
    Wrong("padding is NaN", attending(_nan_rows), "padding"),
    Wrong("the last key dropped", tensors(lambda q, k, v, m: (
        (q, k, v, m) if k.shape[2] == 1 else
        (q, k[:, :, :-1], v[:, :, :-1], None if m is None else m[..., :-1]))), "last key"),
    Wrong("the first key dropped", tensors(lambda q, k, v, m: (
        (q, k, v, m) if k.shape[2] == 1 else
        (q, k[:, :, 1:], v[:, :, 1:], None if m is None else m[..., 1:]))), "first key|NaN|off by"),
    Wrong("keys beyond 64 forgotten", _long_keys(64), "not see|off by"),
    Wrong("padding ignored", masks(_mask_without("attention_mask")), "padding"),
    Wrong("padding on the other side", masks(_right_padding), "padding|not see"),
    Wrong("padding of the first row", masks(_padding_of_row_0), "padding|not see"),
    Wrong("queries begin at 0", masks(_mask_without("q_offset")), "counts from the first"),
    Wrong("keys begin at 0", masks(_mask_without("kv_offset")), "see|window|later"),
    Wrong("its own causality", masks(_own_causality), "window is ignored|not see|see"),
    Wrong("no mask", masks(_never), "masked|later|padding"),
    Wrong("no mask where torch has is_causal", masks(_skips), "later|masked"),
    Wrong("one mask for ever", masks(MaskOnce()), "see|padding|window|off by"),
    Wrong("one key later", masks(_one_more(seen=True)), "one later key|see"),
    Wrong("one key fewer", masks(_one_more(seen=False)), "not see|own key|off by"),
    Wrong("changes its query", tensors(_in_place), "changes its query"),
    Wrong("changes its values", tensors(_values_in_place), "changes its"),
    Wrong("changes its mask", tensors(_mask_in_place), "changes its mask|see"),
    Wrong("one piece of memory", pads(Buffered()), "memory that is used again"),
    Wrong("what it gave first", pads(First(right.forward)), "off by"),
    Wrong("what it gave first, in pages", packs(First(right.packed)), "off by|returns"),
    Wrong("the query as its output", pads(lambda m, q, k, v, mask, **kw: (
        q.transpose(1, 2).contiguous().copy_(right.forward(m, q, k, v, mask, **kw)[0])
        if q.shape[3] != v.shape[3] else q.transpose(1, 2).copy_(
            right.forward(m, q, k, v, mask, **kw)[0]), None)), "contiguous|changes|memory"),
    Wrong("no gradients", pads(_detached), "no gradients"),
    Wrong("no gradients of keys", pads(_keys_detached), "gradient of its keys"),
    Wrong("leaves another dtype", _leaves(lambda: torch.set_default_dtype(torch.float64)),
          "default dtype"),
    Wrong("leaves threads", _leaves(lambda: torch.set_num_threads(3)), "threads"),
    Wrong("draws random numbers", _leaves(lambda: torch.rand(1)), "random numbers"),
    Wrong("seeds", _leaves(lambda: torch.manual_seed(7)), "random numbers"),
    Wrong("drops out", output(lambda out: torch.nn.functional.dropout(out, 0.1, training=True)),
          "off by|random"),
    Wrong("no pair", pads(lambda *a, **kw: right.forward(*a, **kw)[0]), "output, weights"),
    Wrong("keeps records in blocks", packs(_records()), "bytes of memory stay"),
    Wrong("nothing", pads(lambda *a, **kw: None), "output, weights"),
    Wrong("raises for one query", pads(lambda m, q, *a, **kw: right.forward(m, q, *a, **kw)
          if q.shape[2] > 1 else 1 / 0), "ZeroDivision"),
    Wrong("ends the process", pads(lambda *a, **kw: os._exit(3)), "ended the process"),
    Wrong("declares pages and has none", of(has={"bind": lambda self, context: BoundAttention(
        right.forward, right.mask)}), "no `packed`"),
    Wrong("a pair in pages", packs(lambda *a, **kw: (right.packed(*a, **kw), None)),
          "must return a tensor"),
    Wrong("a row too many", packs(lambda *a, **kw: right.packed(*a, **kw)[None]), "returns"),
    Wrong("heads first in pages", packs(lambda *a, **kw: right.packed(*a, **kw).transpose(0, 1)),
          "transposed|returns"),
    Wrong("no causality in pages", packs(rows_of(_all)), "later|masked"),
    Wrong("no window in pages", packs(rows_of(_no_window)), "window is ignored"),
    Wrong("a window too long in pages", packs(rows_of(_window(1))), "one key too long"),
    Wrong("a window too short in pages", packs(rows_of(_window(-1))), "one key too short"),
    Wrong("top left in pages", packs(rows_of(_top_left)), "counts from the first"),
    Wrong("not its own key in pages", packs(rows_of(_strictly)), "own key|not see"),
    Wrong("the window of the keywords", packs(_window_of_kwargs), "window"),
    Wrong("looks back only in blocks", packs(rows_of(), features=BLOCKS),
          "on to the end of their block"),
    Wrong("blocks whatever the window", packs(rows_of(_whole_blocks), features=BLOCKS),
          "before their window"),
    Wrong("blocks of the first sequence", packs(rows_of(_blocks_of_row_0), features=BLOCKS),
          "see|off by"),
    Wrong("on from blocks to the last key", packs(rows_of(_on_from_blocks), features=BLOCKS),
          "on to the last key|see"),
    Wrong("pages in a row", packs(rows_of(keys=_in_a_row)), "NaN|off by|finite"),
    Wrong("the first token's place forgotten", packs(rows_of(keys=_first_forgotten)),
          "off by|see|NaN"),
    Wrong("the last page not read", packs(rows_of(keys=_zeros_for_the_rest)), "see|off by"),
    Wrong("pages of the first sequence", packs(rows_of(keys=_pages_of_row_0)),
          "sequence|NaN|off by"),
    Wrong("pages beyond 256 tokens not read", packs(rows_of(keys=_far(256))), "see|off by"),
    Wrong("rows in reverse", packs(rows_of(order=lambda rows: rows[::-1])),
          "output of sequence|off by"),
    Wrong("rows by length", packs(rows_of(order=lambda rows: sorted(rows, key=len))),
          "output of sequence|off by"),
    Wrong("keys gathered once a step", packs(rows_of(keys=Gathered(lambda la: id(la.tables)))),
          "layer|step"),
    Wrong("keys gathered once a layer", packs(rows_of(keys=Gathered(id))), "step|off by"),
    Wrong("masks of a step, whatever the window", packs(rows_of(MaskOfStep())), "window|layer"),
    Wrong("writes into pages", packs(_writes_pages), "changes its pages"),
    Wrong("writes into tables", packs(_sorts_tables), "changes (its|the)"),
    Wrong("reads what nobody wrote", packs(_reads_nan), "nobody has written|NaN"),
    Wrong("keys beyond 512 forgotten", attending(_up_to(512)), "does not see key 512"),
    Wrong("keys beyond 2048 forgotten", attending(_up_to(2048)), "does not see key 2048"),
    Wrong("keys beyond 8192 forgotten", attending(_up_to(8192)), "does not see key 8192"),
    Wrong("sums not rescaled", attending(_in_blocks(sums=False, outputs=True)),
          "the sums of exponentials of earlier blocks of 64"),
    Wrong("values not rescaled", attending(_in_blocks(sums=True, outputs=False)),
          "the mixed values of earlier blocks of 64"),
    Wrong("nothing rescaled", attending(_in_blocks(sums=False, outputs=False)),
          "sums and mixed values of earlier blocks of 64"),
    Wrong("masks by their shape", masks(_mask_by_shape()), "earlier call of the same shape"),
    Wrong("the last columns for the window", pads(_last_of_window), "for the last columns"),
    Wrong("tables by the look of a step", packs(_plan_of_a_step()), "earlier call is taken"),
    Wrong("one query for all drafts", packs(_decodes_wrongly), "off by"),
    Wrong("bits by the batch", packs(_by_batch, batch_invariant=True), "other bits"),
    Wrong("bits by the largest", packs(_by_shared_maximum, batch_invariant=True),
          "other bits|off by"),
    Wrong("calls of a step before", StaleTables, "native_again says that it reads other tables"),
    Wrong("recordable and waits", packs(_waits, recordable=True), "waits for the device"),
    Wrong("recordable by the host's numbers", packs(right.packed, recordable=True),
          "recordable|on the device|raised"),
    Wrong("unrecordable and silent", packs(right.packed, has={
        "unrecordable": lambda self, requirements, options: []}), "unrecordable"),
    Wrong("accepts everything", of(features=PLAIN, layouts=("padded",), dtypes=NARROW,
          has={"refuse": _accepts}), "not declared"),
    Wrong("compares features only", of(features=PLAIN, layouts=("padded",), dtypes=NARROW,
          has={"refuse": _only_features}), "not declared"),
    Wrong("sixteen heads", output(_few_heads(16)), "heads 16 to .* alone"),
    Wrong("thirty-two heads", output(_few_heads(32)), "heads? 3[2-9].* alone"),
    Wrong("groups by shifts", tensors(_groups_in_shifts), "groups of the next smaller power"),
    Wrong("scores of heads by powers of two", tensors(_scores_by_powers),
          "first (64|128|256) numbers of a head alone"),
    Wrong("values of heads by powers of two", attending(_values_by_powers),
          "first (64|128|256) numbers of a head alone"),
    Wrong("windows up to 512", pads(_padded_window_at_most(512), features=PLAIN),
          "windows end after 512"),
    Wrong("windows up to 512 in pages", packs(rows_of(_window_at_most(512))),
          "windows end after 512"),
    Wrong("keys beyond 32768 forgotten", attending(_up_to(32768)), "does not see key 32768"),
    Wrong("keys beyond 65535 forgotten", attending(_up_to(65535)), "does not see key 65535"),
    Wrong("tables by the length of a sequence", packs(_by_length),
          "reads the keys and values of sequence"),
    Wrong("pages in reverse order", packs(rows_of(keys=_ordered(lambda pages: pages[::-1]))),
          "its pages are read in another order"),
    Wrong("pages in sorted order", packs(rows_of(keys=_ordered(sorted))),
          "the order of the pages in its table"),
    Wrong("the first page twice", packs(rows_of(keys=_ordered(lambda p: [p[0], *p[:-1]]))),
          "its pages are read in another order"),
    Wrong("the window of the config in pages", packs(rows_of(_window_of_config)),
          "window of 4 keys is applied in a layer that has none"),
    Wrong("a window too long in decode", packs(rows_of(_window_in_decode(1))), "one key too long"),
    Wrong("a window too short in decode", packs(rows_of(_window_in_decode(-1))),
          "one key too short"),
    Wrong("a window too long, padded", masks(_padded_window(1), features=PLAIN),
          "one key too long"),
    Wrong("a window too short, padded", masks(_padded_window(-1), features=PLAIN),
          "one key too short"),
    Wrong("not transposed with padding", pads(lambda m, q, k, v, mask, **kw: (
        _untransposed if len(q) > 1 else right.forward)(m, q, k, v, mask, **kw)),
          "not transposed"),
    Wrong("only small heads", tensors(lambda q, k, v, m: (
        (q, k, v, m) if q.shape[3] <= 64 else (q[..., :64], k[..., :64], v, m))), "off by"),
)  # fmt: skip


def grown(count: int | None = None, seed: int = 0) -> tuple[Wrong, ...]:
    """Mutants of the right attention; the names of equivalent ones are not known here."""
    return tuple(
        Wrong(mutant.what, lambda m=mutant: m.module().Right(), "")  # type: ignore[misc]
        for mutant in mutants(right, count, seed)
    )


ZOO: tuple[Wrong, ...] = BY_HAND
