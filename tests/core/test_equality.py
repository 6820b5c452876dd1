"""What holds tensors is equal to itself alone: `==` of two tensors is a tensor, and no answer.

The `==` that dataclass makes compares the fields in one Python and as tuples in another, so it
raises, or says yes where only the objects are the same.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import extras
import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = [
    path.relative_to(room).with_suffix("")
    for room in (ROOT / "core", ROOT / "plugins")
    for path in sorted(room.rglob("*.py"))
    if "@dataclass" in path.read_text()
]


@cache
def names_of(module: ModuleType) -> dict[str, Any]:
    """Its names, those that are imported for types alone included."""
    found = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), "<types>", "exec"), found)  # noqa: S102
    return found


def holds_tensors(hint: Any) -> bool:
    """A function of tensors holds none; a dataclass answers for itself."""
    origin = typing.get_origin(hint) or hint
    if origin in (Callable, typing.Literal):
        return False
    if isinstance(origin, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return holds_tensors(origin.__value__)
    if isinstance(origin, type) and issubclass(origin, torch.Tensor):
        return True
    if isinstance(origin, type) and issubclass(origin, tuple) and hasattr(origin, "_fields"):
        return any(map(holds_tensors, hints_of(origin).values()))
    return any(map(holds_tensors, typing.get_args(hint)))


def hints_of(cls: type) -> dict[str, Any]:
    """What is annotated in it and in its parents, each in the words of its own module."""
    found: dict[str, Any] = {}
    for each in reversed([cls for cls in cls.__mro__ if "__annotations__" in vars(cls)]):
        known = names_of(importlib.import_module(each.__module__))
        for name, hint in vars(each)["__annotations__"].items():
            text = getattr(hint, "__forward_arg__", hint)  # that is how NamedTuple keeps it
            found[name] = eval(text, known) if isinstance(text, str) else text  # noqa: S307
    return found


def compared(classes: Iterator[type]) -> list[str]:
    """The dataclasses with tensors that have an `==` of their own."""
    found = []
    for cls in classes:
        hints = hints_of(cls)
        if any(holds_tensors(hints[f.name]) for f in fields(cls) if f.compare):  # type: ignore[arg-type]
            found += [cls.__qualname__] if cls.__eq__ is not object.__eq__ else []
    return found


def dataclasses_of(holder: Any, module: str) -> Iterator[type]:
    """Those that were written there, in other classes too."""
    for value in list(vars(holder).values()):  # what is imported late comes in meanwhile
        if isinstance(value, type) and value.__module__ == module:
            if is_dataclass(value):
                yield value
            if value is not holder:
                yield from dataclasses_of(value, module)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nothing_with_tensors_is_compared_by_its_fields(file: Path) -> None:
    with extras.imports():
        module = importlib.import_module(".".join(p for p in file.parts if p != "__init__"))
        assert compared(dataclasses_of(module, module.__name__)) == []


# The rule sees what it is to see.

Pair = tuple[torch.Tensor, int]


class Named(NamedTuple):
    pair: Pair


@dataclass
class Plain:
    one: torch.Tensor


@dataclass
class Nested:
    many: Mapping[str, list[torch.nn.Parameter | None]]


@dataclass(frozen=True, slots=True)
class Aliased:
    pairs: tuple[Pair, ...]


@dataclass
class InATuple:
    named: Named | None


@dataclass(eq=False)
class Marked:
    one: torch.Tensor


@dataclass
class Heir(Marked):
    """The mark of its parent says nothing of it."""


@dataclass
class Innocent:
    act: Callable[[torch.Tensor], torch.Tensor]
    marked: Marked
    dtype: torch.dtype


def test_the_rule_finds_tensors_wherever_they_are() -> None:
    known = (Plain, Nested, Aliased, InATuple, Marked, Heir, Innocent)
    assert compared(iter(known)) == ["Plain", "Nested", "Aliased", "InATuple", "Heir"]
