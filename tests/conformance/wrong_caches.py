"""Caches of a stranger, each wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from wrong_attentions import UntoldError, raising

from jackfield.contracts import BindContext, Cache, CacheCapabilities, TransformersCache
from jackfield.running.padded import PaddedKVCache
from jackfield_plugins.cache.paged.store import PagedKVCache

Change = Callable[..., Any]


def packed(**members: Any) -> Cache:
    """Pages of jackfield, with other methods; each is handed the method that it replaces."""

    class Wrong(Cache):
        name = "wrong"
        capabilities = CacheCapabilities(
            layout="packed", layer_types=frozenset({"full_attention"}), forks=True
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
            made = PaddedKVCache(
                lambda _: transformers.DynamicCache(config=context.config), context.device
            )
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
        for feed in step.feeds:
            feed.sequence.num_cached = change(feed.sequence.num_cached)

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


#: In both layouts.
BOTH: dict[str, dict[str, Change]] = {
    "admit raises": {"admit": raising(OSError("full"))},
    "admit says nothing": {"admit": lambda own, s: own(s) and None},
    "admit says 1": {"admit": lambda own, s: int(own(s))},
    "admit lets nobody in": {"admit": lambda own, s: False},
    "admits with all tokens cached": {"admit": admitted(99)},
    "admits with -1 cached": {"admit": admitted(-1)},
    "admits with half a token": {"admit": admitted(0.5)},
    "portions raises": {"portions": raising(SystemExit(2))},
    "portions of nothing": {"portions": lambda own, s, wanted: [0] * len(wanted)},
    "portions of one row": {"portions": lambda own, s, wanted: own(s, wanted)[:1]},
    "portions of more": {"portions": lambda own, s, wanted: [n + 1 for n in own(s, wanted)]},
    "portions of floats": {"portions": lambda own, s, wanted: [float(n) for n in own(s, wanted)]},
    "portions sorts what it is given": {"portions": lambda own, s, wanted: s.sort()},
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
    "commit raises": {"commit": raising(ValueError("lost"))},
    "commit does nothing": {"commit": lambda own, *args: None},
    "commit counts one more": {"commit": counting(lambda n: n + 1)},
    "commit counts one less": {"commit": counting(lambda n: n - 1)},
    "commit counts floats": {"commit": counting(lambda n: n + 0.5)},
    "commit adds a token": {"commit": lambda own, step, _: step.feeds[0].sequence.tokens.append(1)},
    "release raises": {"release": raising(MemoryError("no room"))},
    "refuse says False": {"refuse": lambda own, *args: False},
    "refuse raises": {"refuse": raising(KeyError("size"))},
}

PACKED: dict[str, dict[str, Change]] = {
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
    "spans in another order": {"write": tables(_spans(lambda spans: spans[::-1]))},
    "spans one token late": {
        "write": tables(_spans(lambda spans: [s._replace(end=s.end + 1) for s in spans]))
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
