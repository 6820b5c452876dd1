"""Each flag has a type that every typer takes: some know no `Literal`.

One that it does not know ends every command, and shows only where that typer is installed.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from jackfield.cli.app import app

PLAIN = (str, int, float, bool, Path)


def commands(group: Any = app) -> dict[str, Callable[..., Any]]:
    """name -> the function that typer reads, of all commands and groups."""
    found = {one.name: one.callback for one in group.registered_commands}
    for nested in group.registered_groups:
        inner = commands(nested.typer_instance)
        found |= {f"{nested.name} {name}": command for name, command in inner.items()}
    return {**found, group.info.name or "": group.registered_callback.callback}


def understood(hint: Any) -> bool:
    """`X`, `X | None`, `list[X]` or `list[X] | None`, of a plain `X` or an enumeration."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        some = [one for one in typing.get_args(hint) if one is not type(None)]
        return len(some) == 1 and understood(some[0])
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    return hint in PLAIN or (isinstance(hint, type) and issubclass(hint, enum.Enum))


def not_understood(command: Callable[..., Any]) -> list[str]:
    hints = typing.get_type_hints(command)  # without what Annotated adds
    own = {name: hint for name, hint in hints.items() if name not in ("return", "context")}
    return [f"{name}: {hint}" for name, hint in own.items() if not understood(hint)]


@pytest.mark.parametrize("name", commands())
def test_typer_knows_the_type_of_each_flag(name: str) -> None:
    assert not_understood(commands()[name]) == []


def test_all_commands_are_looked_at() -> None:
    assert {"", "generate", "serve", "bench run", "bench serve"} <= set(commands())


def test_a_type_that_it_does_not_know_is_seen() -> None:
    def command(
        good: Annotated[list[str] | None, "a flag"] = None,
        choice: Annotated[Literal["a", "b"], "a flag"] = "a",
        pair: Annotated[str | int, "a flag"] = 1,
        table: Annotated[dict[str, int] | None, "a flag"] = None,
    ) -> None: ...

    seen = not_understood(command)
    assert [one.partition(":")[0] for one in seen] == ["choice", "pair", "table"]
