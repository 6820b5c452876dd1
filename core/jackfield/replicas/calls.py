"""What goes between the server that clients reach and its replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jackfield.batch.lines import Line


@dataclass(frozen=True)
class Reply:
    """Where the answer to a call is brought, and its number there; `token` is shown first."""

    host: str
    port: int
    token: bytes
    number: int


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What some replica is asked.

    `blocks` stand for the beginning of its prompt (`prefixes.blocks`); `to` names the replica that
    has what the request is about, if one has. Those of `lost` were asked, and end.
    """

    blocks: tuple[int, ...] = ()
    to: str | None = None
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call(Routed):
    """A request of a client as a replica is handed it.

    `id` is that of the request in both logs; `reply` is there once it is handed on.
    """

    id: str
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    reply: Reply | None = None


@dataclass(frozen=True)
class LineCall(Routed):
    """A line of a batch job that began then; `name` is that of its request."""

    line: Line
    name: str
    began: int


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
