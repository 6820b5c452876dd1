"""Replicas in this process, that can be lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import openai

import jackfield
from jackfield.engine.engine import Engine
from jackfield.replicas.calls import Began, Call, Messages, ReplicaLostError
from jackfield.replicas.front import create_front
from jackfield.replicas.prefixes import OpenRequests, Prefixes
from jackfield.replicas.receiving import Incoming
from jackfield.replicas.replica import Replica, versions
from jackfield.replicas.sending import Outgoing
from jackfield.serving.metrics import Metrics
from jackfield.serving.settings import ServerSettings, given_settings

Choose = Callable[[Call, dict[str, int]], str]


class Fleet:
    """`losing` says after how many pieces of an answer its replica is lost, for the next calls."""

    def __init__(self, replicas: Mapping[str, Replica], choose: Choose | None = None) -> None:
        self.replicas = dict(replicas)
        self.losing: list[int | None] = []
        self.asked: list[tuple[str, Call]] = []
        self.closed = 0
        self.requests, self.prefixes = OpenRequests(), Prefixes()
        self.incoming, self.outgoing = Incoming("127.0.0.1"), dict[str, Outgoing]()
        self._choose = choose or (lambda call, loads: self.prefixes.choose(call.blocks, loads)[0])

    async def ask(self, call: Call) -> AsyncGenerator[Began | Messages, None]:
        loads = self.requests.loads(name for name in self.replicas if name not in call.lost)
        name = call.to if call.to in loads else self._choose(call, loads)
        assert name is not None
        self.asked.append((name, call))
        left = self.losing.pop(0) if self.losing else None
        self.requests.begin(call.id, name)
        try:
            async with self.incoming.opened() as answer:
                task = self._begin(name, replace(call, reply=answer.reply))
                try:
                    async for piece in answer:
                        for one in [piece] if isinstance(piece, Began) else piece:
                            if left is not None:
                                if left == 0:
                                    self.replicas.pop(name)
                                    raise ReplicaLostError("ActorDiedError")
                                left -= 1
                            yield one if isinstance(one, Began) else [one]
                finally:
                    task.cancel()
                    await asyncio.wait({task})
        finally:
            self.closed += 1
            self.requests.end(call.id, name)

    def _begin(self, name: str, call: Call) -> asyncio.Task[None]:
        outgoing = self.outgoing.setdefault(name, Outgoing(name))
        return asyncio.create_task(outgoing.bring(call, self.replicas[name].answer))

    def close(self) -> None:
        for outgoing in self.outgoing.values():
            outgoing.close()
        self.incoming.close()

    async def metrics(self) -> Mapping[str, bytes]:
        return dict(replica.metrics() for replica in self.replicas.values())


@contextlib.asynccontextmanager
async def fleet(
    count: int = 2, load: Callable[..., Engine] = jackfield.load, choose: Choose | None = None,
    **given: Any,
) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:  # fmt: skip
    """So many replicas of the small model, and a client of what stands in front of them."""
    settings: ServerSettings = given_settings(**{"stream_interval": 0.0, **given})
    async with contextlib.AsyncExitStack() as stack:
        replicas = {}
        for number in range(count):
            replica = Replica(settings, versions(), f"r{number}", load)
            await replica.open()
            stack.push_async_callback(replica.close)
            replicas[replica.name] = replica
        found = Fleet(replicas, choose)
        stack.callback(found.close)
        app = create_front(settings, found, Metrics())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield found, client


def talking(client: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=client
    )
