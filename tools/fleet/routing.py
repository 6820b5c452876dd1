"""Where a request goes: jackfield's own routing, and two to compare it with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

from fleet.requests import Request


class Router(Protocol):
    """`loads` are the open requests of those that take some, by name; one at least."""

    def choose(self, request: Request, loads: Mapping[str, int]) -> str: ...


class Anywhere:
    """At random."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def choose(self, request: Request, loads: Mapping[str, int]) -> str:
        return self._draw.choice(tuple(loads))


class LeastLoaded:
    """Who has the fewest, the first of them."""

    def choose(self, request: Request, loads: Mapping[str, int]) -> str:
        return min(loads, key=loads.__getitem__)


class ByPrefix:
    """What `jackfield serve --replicas` does."""

    def __init__(self) -> None:
        from jackfield.replicas.prefixes import Prefixes

        self._prefixes = Prefixes()

    def choose(self, request: Request, loads: Mapping[str, int]) -> str:
        return self._prefixes.choose(request.blocks, loads)[0]
