"""A cache whose exceptions are reported as its backend's; what it returns is not checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jackfield.contracts import KVCache, ModelInputs, PackedKVCache, PackedLayer
from jackfield.guarded import guarded

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import Step
    from jackfield.contracts.native import NativeCall

#: What the engine calls of a cache; `write` is guarded by who calls it, once for both calls.
CALLED = (
    "admit", "close", "commit", "preempt", "fits", "fix", "forget", "fork", "held_bytes",
    "loosen", "adjust_schedule", "prepare", "refuse", "release", "truncate", "usage",
)  # fmt: skip


def _guarded(name: str) -> Callable[..., Any]:
    def method(self: GuardedCache, *args: Any) -> Any:
        with self._guards[name]:
            return getattr(self.inner, name)(*args)

    method.__name__ = name
    return method


class GuardedCache(KVCache):
    """`inner`, the cache of the backend `who`. A step costs it some two microseconds."""

    def __init__(self, inner: KVCache, who: object) -> None:
        self.inner = inner
        self._who = who
        self._guards = {name: guarded(who, name) for name in CALLED}
        self.continuous = inner.continuous  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __str__(self) -> str:
        return str(self._who)

    admit = _guarded("admit")
    close = _guarded("close")
    commit = _guarded("commit")
    preempt = _guarded("preempt")
    fits = _guarded("fits")
    fix = _guarded("fix")
    forget = _guarded("forget")
    fork = _guarded("fork")
    held_bytes = _guarded("held_bytes")
    loosen = _guarded("loosen")
    adjust_schedule = _guarded("adjust_schedule")
    refuse = _guarded("refuse")
    release = _guarded("release")
    truncate = _guarded("truncate")
    usage = _guarded("usage")

    def prepare(self, step: Step) -> ModelInputs:
        with self._guards["prepare"]:
            found = self.inner.prepare(step)
        past = found.kwargs.get("past_key_values")
        if past is not None and "update" not in vars(past):
            self._watch(past)
        return found

    def _watch(self, past: Any) -> None:
        """Tell as the cache's what a cache of transformers raises while the model runs.

        It must not refer to itself: its memory is free as soon as nobody has it.
        """
        update, weakly = type(past).update, weakref.ref(past)
        guard, look = guarded(self._who, "update"), self._look_at_update

        def watched(key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            cache: Any = weakly()
            with guard:
                found = update(cache, key, value, layer, *args, **kwargs)
                look(cache.layers[layer], key, found)
            return found

        past.update = watched

    def _look_at_update(self, layer: Any, key: Any, found: Any) -> None:
        """Raise where `found` of a layer of transformers' cache is not what is due for `key`."""


class GuardedPackedCache(GuardedCache, PackedKVCache):
    """The same in the packed layout."""

    def __init__(self, inner: PackedKVCache, who: object) -> None:
        super().__init__(inner, who)
        self._pages = inner
        self.page_size = inner.page_size
        self.overlaps = inner.overlaps

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        return self._pages.write(layer, keys, values)

    def native_write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer, NativeCall] | None:
        return self._pages.native_write(layer, keys, values)

    def native_again(self, tokens: int) -> bool:
        return self._pages.native_again(tokens)
