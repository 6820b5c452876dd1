"""Caches of a stranger, each wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import transformers
from wrong_attentions import UntoldError, raising

from jackfield.contracts import (
    BindContext,
    Cache,
    CacheCapabilities,
    PackedLayer,
    PaddedCache,
    TransformersCache,
)
from jackfield.engine.padded import PaddedKVCache
from jackfield_plugins.cache.paged.store import PagedKVCache

Change = Callable[..., Any]


def packed(**members: Any) -> Cache:
    """Pages of jackfield, with other methods; each is handed the method that it replaces."""

    class Wrong(Cache):
        name = "wrong"
        capabilities = CacheCapabilities(
            layout="packed", layer_types=frozenset({"full_attention"}), compiles=True, forks=True
        )

        def bind(self, context: BindContext) -> Any:
            made = PagedKVCache(context.requirements.windows, 4, None, context.device)
            return overridden(made, members)

    return Wrong()


def padded(**members: Any) -> Cache:
    """Rows of jackfield, with other methods."""

    class Wrong(Cache):
        name = "wrong"
        capabilities = CacheCapabilities(
            layout="padded", layer_types=frozenset({"full_attention"}), forks=True
        )

        def bind(self, context: BindContext) -> Any:
            bound = PaddedCache(lambda _: transformers.DynamicCache(config=context.config))
            made = PaddedKVCache(bound, context)
            return overridden(made, members)

    return Wrong()


def overridden(made: Any, members: dict[str, Change]) -> Any:
    def method(name: str, change: Change) -> Any:
        own = getattr(type(made), name)
        return lambda self, *args: change(lambda *given: own(self, *given), *args)

    changed = {name: method(name, change) for name, change in members.items()}
    made.__class__ = type("Wrong", (type(made),), changed)
    return made


def of_transformers(make: Callable[[Any], Any]) -> Cache:
    class Wrong(TransformersCache):
        name = "wrong"
        capabilities = CacheCapabilities(layout="padded", layer_types=frozenset({"full_attention"}))

        def make(self, context: BindContext, length: int | None) -> Any:
            return make(context.config)

    return Wrong()


def updating(change: Callable[..., Any]) -> Cache:
    class Wrong(transformers.DynamicCache):
        def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return change(key, *super().update(key, value, *args, **kwargs))

    return of_transformers(lambda config: Wrong(config=config))


def inputs(**changed: Any) -> Change:
    """Of prepare: other fields of what it returns, by what is there."""

    def prepare(own: Change, step: Any) -> Any:
        found = own(step)
        return replace(found, **{k: change(getattr(found, k)) for k, change in changed.items()})

    return prepare


def other(**changed: Any) -> Change:
    """Of prepare: other keyword arguments of the forward call, by what is there."""
    return inputs(
        kwargs=lambda kwargs: {**kwargs, **{k: change(kwargs[k]) for k, change in changed.items()}}
    )


def counting(change: Callable[[int], Any]) -> Change:
    """Of commit: another `num_cached`."""

    def commit(own: Change, step: Any, kept: Any) -> None:
        own(step, kept)
        for item in step.scheduled:
            item.sequence.num_cached = change(item.sequence.num_cached)

    return commit


def admitted(count: Any) -> Change:
    def admit(own: Change, sequence: Any) -> bool:
        own(sequence)
        sequence.num_cached = count
        return True

    return admit


def written(change: Callable[[Any], Any]) -> Change:
    return lambda own, *args: change(own(*args))


def tables(change: Callable[[Any], Any]) -> Change:
    """Of write: tables that are changed before anybody reads them."""

    def wrong(layer: Any) -> Any:
        change(layer.tables)
        return layer

    return written(wrong)


def _pages(number: int) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        found.tables = [[number] * len(row) for row in found.tables]

    return change


def _spans(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(found: Any) -> None:
        found.step.spans = change(found.step.spans)

    return changed


def keeping(change: Callable[[Any, Any], Any]) -> Change:
    """Of prepare: other `logits_to_keep`, by what is there and the number of tokens."""

    def prepare(own: Change, step: Any) -> Any:
        found = own(step)
        kept, tokens = found.kwargs["logits_to_keep"], found.kwargs["input_ids"].shape[1]
        return replace(found, kwargs={**found.kwargs, "logits_to_keep": change(kept, tokens)})

    return prepare


def storing(change: Callable[[Any, Any], tuple[Any, Any]]) -> Change:
    """Of write: other keys and values than those that it is given."""
    return lambda own, layer, keys, values: own(layer, *change(keys, values))


def late(what: str, change: Change, steps: int) -> dict[str, Change]:
    """Right in the first `steps` calls."""
    left = [steps]

    def changed(own: Change, *args: Any) -> Any:
        left[0] -= 1
        return own(*args) if left[0] >= 0 else change(own, *args)

    return {what: changed}


def stepwise(change: Callable[[Any], Any]) -> Change:
    """Of write: what a step says of itself, changed."""

    def changed(found: Any) -> None:
        change(found.step)

    return tables(changed)


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda found: setattr(found, name, change(getattr(found, name)))


def _rows(change: Callable[[list[list[int]]], Any]) -> Callable[[Any], None]:
    """Other pages, on the host and on the device."""

    def changed(found: Any) -> None:
        rows = change([list(row) for row in found.tables])
        found.tables = rows
        longest = max(map(len, rows))
        padded = [row + [0] * (longest - len(row)) for row in rows]
        found.block_table = torch.tensor(padded, dtype=torch.int32)
        found.__post_init__()

    return changed


def _foreign(rows: list[list[int]]) -> list[list[int]]:
    """The first page of each row is that of the next one."""
    firsts = [row[0] for row in rows]
    return [[firsts[i - 1], *row[1:]] for i, row in enumerate(rows)]


def _claim(own: Change, sequence: Any) -> bool:
    """Half of its tokens, which nobody ever fed."""
    own(sequence)
    sequence.num_cached = len(sequence.tokens) // 2
    return True


class Astray:
    """Of write: the pages of another layer, where keys and values are stored as well."""

    def __call__(self, own: Change, layer: int, keys: Any, values: Any) -> Any:
        return own(0, keys, values)


def _skips(own: Change, layer: int, keys: Any, values: Any) -> Any:
    """Does not store the last token: what was in its place stays there."""
    found = own(layer, keys, values)
    row, span = found.tables.tables[-1], found.step.spans[-1]
    at = span.kv_len - 1 - found.tables.firsts[-1]
    found.keys[row[at // found.page_size], at % found.page_size] = 0
    return found


def after_commit(deed: Callable[[Any], Any]) -> Change:
    def commit(own: Change, step: Any, kept: Any) -> None:
        own(step, kept)
        deed(step.scheduled[0].sequence)

    return commit


def _cache(own: Change) -> Any:
    """The cache whose method `own` is."""
    return own.__closure__[1].cell_contents  # type: ignore[attr-defined]


def _wipes(own: Change, step: Any, kept: Any) -> None:
    own(step, kept)
    for group in _cache(own).groups.values():
        for layer in group.pools.layers.values():
            layer.keys.zero_()


#: In both layouts.
BOTH: dict[str, dict[str, Change]] = {
    "admit raises": {"admit": raising(OSError("full"))},
    "admit says nothing": {"admit": lambda own, s: own(s) and None},
    "admit says 1": {"admit": lambda own, s: int(own(s))},
    "admit lets nobody in": {"admit": lambda own, s: False},
    "admits with all tokens cached": {"admit": admitted(99)},
    "admits with -1 cached": {"admit": admitted(-1)},
    "admits with half a token": {"admit": admitted(0.5)},
    "adjust_schedule raises": {"adjust_schedule": raising(SystemExit(2))},
    "adjust_schedule of nothing": {"adjust_schedule": lambda own, s, wanted: [0] * len(wanted)},
    "adjust_schedule of one row": {"adjust_schedule": lambda own, s, wanted: own(s, wanted)[:1]},
    "adjust_schedule of more": {
        "adjust_schedule": lambda own, s, wanted: [n + 1 for n in own(s, wanted)]
    },
    "adjust_schedule of floats": {
        "adjust_schedule": lambda own, s, wanted: [float(n) for n in own(s, wanted)]
    },
    "adjust_schedule sorts what it is given": {"adjust_schedule": lambda own, s, wanted: s.sort()},
    "fits says None": {"fits": lambda own, step: None},
    "fits raises": {"fits": raising(UntoldError())},
    "prepare raises": {"prepare": raising(RuntimeError("no memory"))},
    "prepare returns nothing": {"prepare": lambda own, step: None},
    "prepare returns a dict": {"prepare": lambda own, step: own(step).kwargs},
    "prepare without input_ids": {"prepare": other(input_ids=lambda ids: None)},
    "prepare with half the ids": {"prepare": other(input_ids=lambda ids: ids[:, 1:])},
    "prepare with ids in a row": {"prepare": other(input_ids=torch.flatten)},
    "prepare with ids as floats": {"prepare": other(input_ids=lambda ids: ids.float())},
    "prepare with other positions": {"prepare": other(position_ids=lambda at: at[:, 1:])},
    "prepare with more rows": {"prepare": inputs(rows=lambda n: n + 1)},
    "prepare with another phase": {"prepare": inputs(decode=lambda decode: not decode)},
    "prepare with other tokens": {"prepare": other(input_ids=lambda ids: ids + 1)},
    "prepare with two tokens swapped": {"prepare": other(input_ids=lambda ids: ids.flip(-1))},
    "prepare with another token from the third step on": late(
        "prepare", other(input_ids=lambda ids: ids + 1), 2
    ),
    "prepare with positions one late": {"prepare": other(position_ids=lambda at: at + 1)},
    "prepare with positions from 0": {
        "prepare": other(position_ids=lambda at: torch.arange(at.shape[-1]).expand_as(at))
    },
    "commit changes an id": {"commit": after_commit(lambda s: setattr(s, "id", 10**6))},
    "commit changes a token": {
        "commit": after_commit(lambda s: list.__setitem__(s.tokens, -1, 99))
    },
    "commit raises": {"commit": raising(ValueError("lost"))},
    "commit does nothing": {"commit": lambda own, *args: None},
    "commit counts one more": {"commit": counting(lambda n: n + 1)},
    "commit counts one less": {"commit": counting(lambda n: n - 1)},
    "commit counts floats": {"commit": counting(lambda n: n + 0.5)},
    "commit adds a token": {
        "commit": lambda own, step, _: step.scheduled[0].sequence.tokens.append(1)
    },
    "release raises": {"release": raising(MemoryError("no room"))},
    "refuse says False": {"refuse": lambda own, *args: False},
    "refuse raises": {"refuse": raising(KeyError("size"))},
}

PACKED: dict[str, dict[str, Change]] = {
    "tables of its own for each layer": {
        "write": written(lambda one: PackedLayer(one.keys, one.values, copy(one.tables)))
    },
    "write raises": {"write": raising(IndexError("page 9"))},
    "write returns nothing": {"write": written(lambda layer: None)},
    "write returns tensors": {"write": written(lambda layer: (layer.keys, layer.values))},
    "write has keys of other heads": {
        "write": written(lambda layer: layer.replace(layer.keys[:, :, :1], layer.values) or layer)
    },
    "pages that are not there": {"write": tables(_pages(10**6))},
    "pages before the first": {"write": tables(_pages(-1))},
    "no pages": {
        "write": tables(lambda found: setattr(found, "tables", [[] for _ in found.tables]))
    },
    "prepare without positions": {"prepare": other(position_ids=lambda at: None)},
    "prepare with logits of others": {"prepare": keeping(lambda keep, n: torch.tensor([0, 1]))},
    "prepare with the first logits": {"prepare": keeping(lambda keep, n: torch.arange(2))},
    "prepare with too many logits": {"prepare": keeping(lambda keep, n: n + 1)},
    "prepare with an odd number of logits": {"prepare": keeping(lambda keep, n: torch.arange(1))},
    "sequences in another order": {
        "prepare": lambda own, step: own(replace(step, scheduled=step.scheduled[::-1]))
    },
    "claims a prefix that nobody fed": {"admit": _claim},
    "pages of another row": {"write": tables(_rows(_foreign))},
    "a page twice": {"write": tables(_rows(lambda rows: [[row[0]] * len(row) for row in rows]))},
    "one row for all": {"write": tables(_rows(lambda rows: [rows[0]] * len(rows)))},
    "pages backwards": {"write": tables(_rows(lambda rows: [row[::-1] for row in rows]))},
    "pages that nobody wrote": {
        "write": tables(_rows(lambda rows: [[page + 20 for page in row] for row in rows]))
    },
    "a middle page that is not there": {
        "write": tables(_rows(lambda rows: [[row[0], 10**6, *row[2:-1], row[-1]] for row in rows]))
    },
    "another block table": {"write": tables(_set("block_table", lambda table: table + 1))},
    "a block table in int64": {"write": tables(_set("block_table", torch.Tensor.long))},
    "a block table of one row": {"write": tables(_set("block_table", lambda table: table[:1]))},
    "a block table in a list": {"write": tables(_set("block_table", torch.Tensor.tolist))},
    "first tokens of pages": {"write": tables(_set("firsts", lambda firsts: [1 for _ in firsts]))},
    "first tokens on the device": {"write": tables(_set("first", lambda first: first + 4))},
    "pages after the first token": {
        "write": tables(_set("firsts", lambda firsts: [4 for _ in firsts]))
    },
    "runs of other pages": {
        "write": tables(_set("runs", lambda runs: [(0, 1) if run else run for run in runs]))
    },
    "a window": {"write": tables(_set("window", lambda window: 2))},
    "cu_seqlens_q beyond the tokens": {
        "write": stepwise(_set("cu_seqlens_q", lambda starts: starts * 1000))
    },
    "cu_seqlens_q in int64": {"write": stepwise(_set("cu_seqlens_q", torch.Tensor.long))},
    "cu_seqlens_q of one row": {"write": stepwise(_set("cu_seqlens_q", lambda starts: starts[:1]))},
    "cu_seqlens_q beyond the tokens, late": late(
        "write", stepwise(_set("cu_seqlens_q", lambda starts: starts * 1000)), 8
    ),
    "seq_lens one less": {"write": stepwise(_set("seq_lens", lambda lengths: lengths - 1))},
    "seq_lens beyond": {"write": stepwise(_set("seq_lens", lambda lengths: lengths + 10**6))},
    "max_seqlen_q of 1": {"write": stepwise(_set("max_seqlen_q", lambda n: 1))},
    "max_seqlen_k of 1": {"write": stepwise(_set("max_seqlen_k", lambda n: 1))},
    "max_seqlen_q None": {"write": stepwise(_set("max_seqlen_q", lambda n: None))},
    "stores all layers in the first": {"write": Astray()},
    "stores nothing": {"write": storing(lambda keys, values: (keys * 0, values * 0))},
    "stores keys as values": {"write": storing(lambda keys, values: (values, keys))},
    "stores twice the keys": {"write": storing(lambda keys, values: (2 * keys, values))},
    "stores values negated": {"write": storing(lambda keys, values: (keys, -values))},
    "stores tokens in another order": {
        "write": storing(lambda keys, values: (keys.flip(0), values.flip(0)))
    },
    "stores heads in another order": {
        "write": storing(lambda keys, values: (keys.flip(1), values.flip(1)))
    },
    "stores no numbers": {"write": storing(lambda keys, values: (keys * float("nan"), values))},
    "skips the last token": {"write": _skips},
    "wipes pages with a step": {"commit": _wipes},
    "spans in another order": {"write": tables(_spans(lambda spans: spans[::-1]))},
    "spans one token late": {
        "write": tables(_spans(lambda spans: [s._replace(kv_len=s.kv_len + 1) for s in spans]))
    },
}

TRANSFORMERS: dict[str, Callable[[], Cache]] = {
    "make raises": lambda: of_transformers(raising(ImportError("no library"))),
    "make returns nothing": lambda: of_transformers(lambda config: None),
    "make returns a class": lambda: of_transformers(lambda config: transformers.DynamicCache),
    "update raises": lambda: updating(raising(OSError("disk"))),
    "update returns what is new": lambda: updating(
        lambda key, keys, values: (keys[:, :, -key.shape[2] :], values[:, :, -key.shape[2] :])
    ),
    "update drops the first token": lambda: updating(
        lambda key, keys, values: (keys[:, :, 1:], values[:, :, 1:])
    ),
    "update of fewer values": lambda: updating(lambda key, keys, values: (keys, values[:, :, 1:])),
    "update of one row": lambda: updating(lambda key, keys, values: (keys[:1], values[:1])),
    "update in another dtype": lambda: updating(
        lambda key, keys, values: (keys.half(), values.half())
    ),
    "update returns nothing": lambda: updating(lambda *_: None),
}

#: Of a search that forks.
FORKS: dict[str, dict[str, Change]] = {
    "fork raises": {"fork": raising(ValueError("no copy"))},
    "fork counts nothing": {
        "fork": lambda own, copies, dropped: [
            own(copies, dropped),
            *(setattr(into, "num_cached", 0) for _, into in copies),
        ]
    },
}
