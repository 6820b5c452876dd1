"""What is bound is given back where a load fails; pages that strangers read are held."""

from __future__ import annotations

from typing import Any

import pytest
from families import build, prompts
from recordable import Gathers
from transformers import AttentionInterface

import jackfield
from jackfield.bridge.attention import AttentionBinding
from jackfield.contracts import BindContext, BoundAttention
from jackfield.engine import assembly, bound
from jackfield.errors import PluginError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.cache.paged.store import PagedKVCache


def offer(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    known = registry().backends["attention"]
    mine = Registered(backend, "stranger", "1.0", "mine")
    monkeypatch.setitem(registry().backends, "attention", [*known, mine])


class Changing(Gathers):
    """Changes the pages that it reads, after a while."""

    name = "changing"

    def bind(self, context: BindContext) -> BoundAttention:
        inner, calls = super().bind(context), [0]
        assert inner.packed is not None

        def packed(module: Any, query: Any, layer: Any, **kwargs: Any) -> Any:
            out = inner.packed(module, query, layer, **kwargs)
            calls[0] += 1
            if calls[0] > 10:
                layer.keys.mul_(0.5)
            return out

        return BoundAttention(inner.forward, inner.mask, packed)


def test_an_attention_of_a_stranger_that_changes_our_pages_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, Changing())
    arguments = {"cache_implementation": "paged", "attn_implementation": "changing"}
    with (
        jackfield.load(build("llama"), **arguments) as engine,
        pytest.raises(PluginError, match=r"attention .changing. of stranger 1\.0"),
    ):
        engine.generate(prompts((9, 13)), max_new_tokens=40)


@pytest.mark.parametrize("where", ["warm", "scheduler", "worker", "kernels", "install"])
def test_a_load_that_fails_leaves_nothing_open(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    class Opened(Gathers):
        name = "opened"

        def bind(self, context: BindContext) -> BoundAttention:
            inner = super().bind(context)
            return BoundAttention(
                inner.forward,
                inner.mask,
                inner.packed,
                warm=fails if where == "warm" else None,
                close=lambda: closed.append("attention"),
            )

    offer(monkeypatch, Opened())
    opened: list[str] = []
    begin, end = PagedKVCache.__init__, PagedKVCache.close
    monkeypatch.setattr(
        PagedKVCache,
        "__init__",
        lambda self, *a, **k: (opened.append("cache"), begin(self, *a, **k))[1],
    )
    monkeypatch.setattr(PagedKVCache, "close", lambda self: (closed.append("cache"), end(self)))
    places = {
        "scheduler": (assembly, "CheckedSchedule"),
        "worker": (assembly, "Worker"),
        "kernels": (bound, "bind_layers"),
        "install": (AttentionBinding, "install"),
    }
    if where in places:
        monkeypatch.setattr(*places[where], fails)
    keys = set(AttentionInterface._global_mapping)
    model = build("llama")
    with pytest.raises((PluginError, RuntimeError), match="no"):
        jackfield.load(model, cache_implementation="paged", attn_implementation="opened")
    assert closed.count("cache") == len(opened)
    assert closed.count("attention") == (where not in ("scheduler", "kernels"))
    assert set(AttentionInterface._global_mapping) == keys
    assert not str(model.config._attn_implementation).startswith("jackfield")
