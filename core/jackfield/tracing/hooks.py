"""Attributes of objects that are replaced for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jackfield.guarded import all_of


class Hooks:
    """Replaces attributes of objects by what is made of them, until `remove`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Have `undo` done by `remove`, too."""
        self._undo.append(undo)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Have `owner.name` be what `make` makes of it."""
        own, before = name in vars(owner), getattr(owner, name)
        made = make(before)
        setattr(owner, name, made)

        def undo() -> None:
            if vars(owner).get(name) is not made:
                return  # it is gone, or somebody else's by now
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    def remove(self) -> None:
        """Put everything back, the last first; a second call does nothing."""
        undo, self._undo = self._undo[::-1], []
        all_of(undo)
