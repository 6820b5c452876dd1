"""All that a model's code finds by name is held to, in this process and by graphs on disk."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import FAMILIES, build
from torch import nn
from torch._dynamo import mutation_guard

import jackfield
from jackfield_plugins.compiler.holding import _STEPS, Held
from jackfield_plugins.compiler.native import kept, warmed
from jackfield_plugins.native import keeping

OWN = """
import functools
import odd_helpers
from odd_helpers import once
from odd_settings import SETTINGS
from transformers.models.llama.modeling_llama import LlamaMLP

SCALE = 1.0
TABLE = {"a": [1.0, 2.0]}
UNUSED = 1.0

def beside(x, by=1.0):
    return x * by

def closed(by):
    return lambda x: x * by

CLOSED = closed(1.0)
PARTLY = functools.partial(beside, by=1.0)

class Base(LlamaMLP):
    inherited = 1.0

class Mine(Base):
    factor = 1.0

    def forward(self, x):
        x = super().forward(x) * SCALE * self.factor * self.inherited * TABLE["a"][0]
        x = PARTLY(CLOSED(beside(once(odd_helpers.apart(x)))))
        return x * SETTINGS.of_object * SETTINGS.of_class
"""
HELPERS = """
from odd_deeper import twice

HERE = 1.0

def once(x):
    return twice(x) * HERE

def apart(x):
    return x * HERE
"""
DEEPER = """
THERE = 1.0

def deepest(x):
    return x * THERE

def twice(x):
    return deepest(x)
"""
SETTINGS = """
class Settings:
    of_class = 1.0

    def __init__(self):
        self.of_object = 1.0

SETTINGS = Settings()
"""
SOURCES = {"odd_model": OWN, "odd_helpers": HELPERS, "odd_deeper": DEEPER, "odd_settings": SETTINGS}


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules, as somebody wrote them who keeps code of a model in several files."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    kept._sources_of.cache_clear()
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in SOURCES})
    for name in SOURCES:
        sys.modules.pop(name, None)
    kept._sources_of.cache_clear()


def model_of(odd: Any) -> Any:
    model = copy.deepcopy(build("llama"))
    model.model.layers[0].mlp.__class__ = odd.odd_model.Mine
    return model


def put(place: str, value: Any = 3.0) -> Callable[[Any], None]:
    def change(odd: Any) -> None:
        first, *path, last = place.split(".")
        home = getattr(odd, first)
        for name in path:
            home = getattr(home, name)
        setattr(home, last, value)

    return change


def within(odd: Any) -> None:
    odd.odd_model.TABLE["a"][0] = 3.0


CHANGES: dict[str, Callable[[Any], None]] = {
    "a constant of its file": put("odd_model.SCALE"),
    "an attribute of a class": put("odd_model.Mine.factor"),
    "one that is inherited": put("odd_model.Base.inherited"),
    "a constant of a file beside": put("odd_helpers.HERE"),
    "a constant two calls away": put("odd_deeper.THERE"),
    "a function two calls away": put("odd_deeper.deepest", lambda x: x * 3.0),
    "an attribute of an object": put("odd_settings.SETTINGS.of_object"),
    "an attribute of its class": put("odd_settings.Settings.of_class"),
    "another object": put("odd_model.SETTINGS", SimpleNamespace(of_object=1.0, of_class=3.0)),
    "what a function closes over": lambda odd: put("odd_model.CLOSED", odd.odd_model.closed(3.0))(
        odd
    ),
    "within a table": within,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_code_finds_by_name_is_held_to(odd: Any, change: Callable[[Any], None]) -> None:
    model = model_of(odd)
    before, held = kept._key_of(model), Held(model)
    assert before is not None
    assert before == kept._key_of(model_of(odd))
    assert all(held.next_is_same() for _ in range(2 * _STEPS))
    change(odd)
    assert not all(held.next_is_same() for _ in range(_STEPS))
    assert not held.is_structure()
    assert kept._key_of(model) != before


def test_what_no_code_names_is_nothing_to_it(odd: Any) -> None:
    model = model_of(odd)
    before, held = kept._key_of(model), Held(model)
    odd.odd_model.UNUSED = odd.odd_helpers.NEW = 3.0
    odd.odd_model.Mine.looked_up_later = True  # as transformers remembers what it found out
    assert held.is_structure()
    assert kept._key_of(model) == before


def test_an_engine_goes_by_what_is_there_now(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its life, and with the graph of another process on disk."""
    for module in (kept, warmed):
        monkeypatch.setattr(module, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))
    model, said = model_of(odd), []
    with jackfield.load(model, cache_implementation="paged", compile="native") as engine:
        for change in (lambda _: None, put("odd_deeper.THERE", -3.0)):
            change(odd)
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
    for compiler in ("native", "none"):
        with jackfield.load(model, cache_implementation="paged", compile=compiler) as engine:
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
    assert said[0] != said[1] == said[2] == said[3]


@pytest.mark.parametrize("changed", SOURCES)
def test_sources_of_who_is_no_library_count(odd: Any, changed: str) -> None:
    """An operator of a plugin is reached through torch, where nobody sees its code."""
    model = model_of(odd)
    before = kept._key_of(model)
    file = Path(getattr(odd, changed).__file__)
    file.write_text(file.read_text() + "\n# by another version\n")
    kept._sources_of.cache_clear()
    assert kept._key_of(model) != before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_one_key_whatever_ran_before(family: str) -> None:
    model = build(family)
    before = kept._key_of(model)
    with jackfield.load(model) as engine:
        engine.generate([5, 6, 7], max_new_tokens=2)
    assert kept._key_of(model) == before is not None


def test_what_torch_compile_puts_in_torch_when_it_first_runs_is_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first graph would be made twice, and graphs on disk would have another key after it."""
    model = build("llama")
    before, held, closely = kept._key_of(model), Held(model), Held(model, closely=True)
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))  # put back in the end
    usual = nn.Module.__init__
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    mutation_guard.install_generation_tagging_init()
    assert nn.Module.__init__ is not usual
    assert held.is_structure()
    assert closely.is_structure()
    assert kept._key_of(model) == before


def test_our_own_sources_count(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1")
    before = kept._digest(tmp_path.glob("*.py"))
    (tmp_path / "one.py").write_text("a = 2")
    assert kept._digest(tmp_path.glob("*.py")) != before
    assert len(kept._own_sources()) == 64
