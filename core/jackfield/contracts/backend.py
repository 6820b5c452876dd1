"""What every backend has, whatever its kind."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.requirements import Requirements

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


@dataclass(frozen=True)
class NoOptions:
    """For a backend that takes no options."""


@dataclass(frozen=True, kw_only=True)
class BindContext:
    """What a backend is bound to. `options` is an instance of the backend's own `options` class.

    `model` is None where transformers itself is still loading it (attention only).
    """

    model: PreTrainedModel | None
    config: PreTrainedConfig
    requirements: Requirements
    options: Any


class Backend(ABC):
    """One named implementation of a kind. Instances are made at import: keep `__init__` trivial.

    `options` is a frozen dataclass whose fields are the keys of ``plugin:name?key=value``; field
    types int, float, bool, str, Literal and ``T | None`` are checked when a selection is parsed.
    `auto_rank` lets ``auto`` choose the backend: the highest accepted rank wins, None means that
    it runs only when it is named.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    options: ClassVar[type] = NoOptions
    auto_rank: ClassVar[int | None] = None

    def available(self) -> list[str]:
        """Why this machine cannot run the backend (an empty list means that it can).

        Must be quick and must not raise; name the extra to install where a library is missing.
        """
        return []

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Why this job cannot be done by the backend (an empty list accepts it)."""
        del requirements, options
        return []

    def imply(self, requirements: Requirements) -> Requirements:
        """What the kinds that are decided later must meet, once this backend is chosen."""
        return requirements

    @classmethod
    def flaws(cls) -> list[str]:
        """What is wrong with the definition itself; checked once, when a plugin is registered."""
        found = []
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            found.append(f"`name` must be lower-case words joined by '-', '_' or '.', not {name!r}")
        options = cls.options
        frozen = getattr(getattr(options, "__dataclass_params__", None), "frozen", False)
        if not dataclasses.is_dataclass(options) or not frozen:
            found.append(f"`options` must be a frozen dataclass, not {options!r}")
        return found


def unknown(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raise ValueError naming every member of `given` that is not in `known`."""
    if isinstance(given, str):
        raise ValueError(f"{what} must be a collection of names, not the string {given!r}")
    if stray := sorted(set(given) - set(known)):
        raise ValueError(f"unknown {what} {', '.join(stray)}; known: {', '.join(sorted(known))}")
