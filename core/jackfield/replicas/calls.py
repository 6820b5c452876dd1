"""What goes between the server that clients reach and its replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """Where the answer to a call is brought, and its number there; `token` is shown first."""

    host: str
    port: int
    token: bytes
    number: int


@dataclass(frozen=True)
class Call:
    """A request as a replica is handed it.

    `id` is that of the request in both logs; `blocks` stand for the beginning of its prompt
    (`prefixes.blocks`); `to` names the replica that has what the request is about, if one has.
    `reply` is there once it is handed on.
    """

    id: str
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    blocks: tuple[int, ...] = ()
    to: str | None = None
    reply: Reply | None = None


@dataclass(frozen=True)
class Began:
    """A replica has taken a request; what follows is its answer."""

    replica: str


#: Messages of ASGI that an application sends, as many as there were.
Messages = list[dict[str, Any]]


class ReplicaLostError(Exception):
    """The replica that had a request is gone; says how."""


class Replicas(Protocol):
    """Those who answer."""

    def ask(self, call: Call) -> AsyncGenerator[Began | Messages, None]:
        """Who takes it, then the answer; closing it gives it up. Raises ReplicaLostError."""
        ...

    async def metrics(self) -> Mapping[str, bytes]:
        """What each replica counts, by its name."""
        ...
