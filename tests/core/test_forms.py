"""Every contract is a form: each class, method, argument and field of it is said what it is."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from abc import ABCMeta
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from jackfield import contracts

MODULES = [
    importlib.import_module(f"jackfield.contracts.{module.name}")
    for module in pkgutil.iter_modules(contracts.__path__)
]


def own(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public classes and functions that a module defines."""
    for name, thing in vars(module).items():
        defined = getattr(thing, "__module__", None) == module.__name__
        if defined and name[0] != "_" and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield name, thing


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines, as they are called."""
    for name, thing in vars(cls).items():
        if name[0] == "_":
            continue
        if isinstance(thing, property):
            yield name, thing
        elif inspect.isfunction(found := getattr(cls, name)) and found.__name__[0] != "_":
            yield name, found


def form(cls: type, name: str) -> str:
    """What is said of a method, by the class or by the one that it overrides."""
    return inspect.getdoc(getattr(cls, name)) or ""


def named(word: str, text: str) -> bool:
    """Whether `word` is said what it is: in a section, or in backticks."""
    return bool(re.search(rf"^ +{word}: |`[^`\n]*\b{word}\b[^`\n]*`", text, re.MULTILINE))


def fields(cls: type) -> list[str]:
    """The fields of a record; those of one that it derives from are said there."""
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls) if f.name in vars(cls)["__annotations__"]]
    return list(getattr(cls, "_fields", ()))


def unsaid(module: ModuleType) -> list[str]:
    """What of a module no docstring says."""
    missing = []
    for name, thing in own(module):
        if not (thing.__doc__ or "").strip():
            missing.append(name)
        if not inspect.isclass(thing):
            continue
        missing += [f"{name}.{m}" for m, _ in methods(thing) if not form(thing, m).strip()]
        missing += [f"{name}.{f}" for f in fields(thing) if not named(f, thing.__doc__ or "")]
        if not isinstance(thing, ABCMeta):  # nobody but core has such methods to write
            continue
        for method, function in methods(thing):
            if isinstance(function, property):
                continue
            said = form(thing, method)
            missing += [
                f"{name}.{method}({argument})"
                for argument in list(inspect.signature(function).parameters)[1:]
                if not named(argument, said)
            ]
    return missing


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_contract_is_a_form(module: ModuleType) -> None:
    assert unsaid(module) == []


def test_a_form_with_a_gap_is_found() -> None:
    class Gap(contracts.Schedule):
        """A scheduler that says less than it should."""

        def schedule(self, running: Any, step: int) -> Any:
            """How many tokens each of `running` feeds."""

        def more(self) -> None: ...

    module = ModuleType(Gap.__module__)
    vars(module)["Gap"] = Gap
    assert unsaid(module) == ["Gap.more", "Gap.schedule(step)"]
