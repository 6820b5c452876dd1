"""What keeps an object alive is told as the names that lead to it."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jackfield.testing.holders import kept, through


class Thing:
    """What somebody keeps."""


@pytest.fixture
def plugin() -> Iterator[Any]:
    """A module like a stranger's."""
    module = types.ModuleType("a_plugin")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def _closure(thing: Thing) -> Callable[[], Thing]:
    return lambda: thing


def _holder(thing: Thing) -> types.SimpleNamespace:
    return types.SimpleNamespace(model=thing)


@pytest.mark.parametrize(
    ("keep", "way"),
    [
        (lambda thing: thing, "a_plugin.KEPT"),
        (lambda thing: [0, thing], "a_plugin.KEPT[1]"),
        (lambda thing: {"a": (thing,)}, "a_plugin.KEPT['a'][0]"),
        (lambda thing: {("long",) * 20: thing}, "a_plugin.KEPT[('long', 'long', "),
        (_closure, "a_plugin.KEPT.__closure__[0]"),
        (_holder, "a_plugin.KEPT.model"),
        (lambda thing: functools.partial(print, thing), "a_plugin.KEPT.args[0]"),
    ],
)
def test_the_way_from_a_module(plugin: Any, keep: Callable[[Thing], Any], way: str) -> None:
    thing = Thing()
    plugin.KEPT = keep(thing)
    assert through(thing).startswith(way)


def test_nobody_keeps_what_only_the_asker_has() -> None:
    thing = Thing()
    assert through(thing) == ""
    seen = weakref.ref(thing)
    assert kept("stays", seen) == "stays: through nothing that Python can see"
    del thing
    gc.collect()
    assert seen() is None  # asking keeps nothing
