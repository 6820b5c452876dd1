"""The application in front of replicas: it lets requests in, hands them on, and asks again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jackfield.replicas.calls import Began, Call, Messages, ReplicaLostError, Replicas
from jackfield.replicas.counted import merged
from jackfield.replicas.prefixes import blocks
from jackfield.replicas.stored import PATH, StoredIds
from jackfield.serving.answering import ENDPOINTS
from jackfield.serving.app import of_sites
from jackfield.serving.errors import ApiError
from jackfield.serving.events import DONE, event
from jackfield.serving.guards import Guard, Receive, Scope, Send
from jackfield.serving.keys import Keys
from jackfield.serving.metrics import CONTENT_TYPE, Metrics
from jackfield.serving.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger("jackfield.serving")

TAKEN_WITHIN = 30.0  # seconds in which a replica must take a request
READY_WITHIN = 3.0  # and one that asks whether any takes some
_ATTEMPTS = 2  # a request that ends replicas must not end all of them, one after the other
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def create_front(settings: ServerSettings, replicas: Replicas, metrics: Metrics) -> Starlette:
    """The ASGI application in front of `replicas`; keys, rates and bounds are those of one server.

    A request whose answer has not begun when its replica is lost goes to another one. A stream that
    has begun ends with an error.
    """

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "alive", **getattr(app.state, "running", {})})

    async def counted(request: Request) -> Response:
        found = await replicas.metrics()
        return Response(merged(metrics.show(), found), headers={"Content-Type": CONTENT_TYPE})

    handing_on = HandingOn(replicas)
    app = Starlette(
        routes=[
            Route("/health/live", live), Route("/metrics", counted),
            Route("/{path:path}", handing_on),
        ]
    )  # fmt: skip
    app.add_middleware(Guard, settings=settings, keys=Keys(settings.keys), metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **of_sites(settings))
    return app


class HandingOn:
    """Answers a request with what a replica says."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._stored = StoredIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = await self._call(scope, receive)
        answering = asyncio.create_task(self._answer(call, scope, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _call(self, scope: Scope, receive: Receive) -> Call:
        body, path, own = await _body(receive), scope["path"], scope["state"]
        told = _object(body) if path in ENDPOINTS else {}
        if path in ENDPOINTS:
            scope["route"] = SimpleNamespace(path=path)  # under which it is counted
        own["said"] = {"model": told.get("model")}
        return Call(
            own["id"], scope["method"], path, scope["query_string"],
            tuple((bytes(key), bytes(value)) for key, value in scope["headers"]), body,
            blocks=blocks(own["owner"], told) if told else (),
            to=self._stored.replica_of(path, told),
        )  # fmt: skip

    async def _answer(self, call: Call, scope: Scope, send: Send) -> None:
        for left in reversed(range(_ATTEMPTS)):
            answer = _Answer(call, send)
            try:
                await self._attempt(call, answer, scope)
                return
            except ReplicaLostError as error:
                logger.warning("%s: its replica is lost: %s", call.id, error)
                if answer.begun:
                    await answer.break_off(error)
                    return
                if not left:
                    raise ApiError(
                        503, f"{_ATTEMPTS} replicas were lost with this request", code="lost"
                    ) from None
                call = replace(call, lost=(*call.lost, answer.replica))

    async def _attempt(self, call: Call, answer: _Answer, scope: Scope) -> None:
        async with contextlib.aclosing(self._replicas.ask(call)) as said:
            began = await _taken(said, READY_WITHIN if _is_probe(call) else TAKEN_WITHIN)
            scope["state"]["said"]["replica"] = answer.replica = began.replica
            async for messages in said:
                assert not isinstance(messages, Began)
                if call.path.startswith(PATH):
                    for message in messages:
                        self._stored.told(began.replica, message.get("body", b""))
                await answer.take(messages)


class _Answer:
    """What goes to the client, which hears nothing before there is something of the body."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call, self._send = call, send
        self._head: dict[str, Any] | None = None
        self._last = b""
        self._streams = False
        self.begun = False
        self.replica = ""

    async def take(self, messages: Messages) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if self._head is not None:
                await self._begin(self._head)
            self._last = message.get("body") or self._last
            await self._send(message)

    async def _begin(self, head: dict[str, Any]) -> None:
        headers = [(k, v) for k, v in head.get("headers", ()) if k.lower() != b"x-request-id"]
        kind = dict(headers).get(b"content-type", b"")
        self._streams = kind.startswith(b"text/event-stream")
        headers.append((b"x-jackfield-replica", self.replica.encode()))
        self.begun, self._head = True, None
        await self._send({**head, "headers": headers})

    async def break_off(self, cause: ReplicaLostError) -> None:
        """End a stream by an error; raise ReplicaLostError where it is none, to be cut off."""
        why = f"the replica that made this answer was lost before its end ({cause}); ask again"
        if not self._streams:
            raise ReplicaLostError(why)
        error = ApiError(503, why, code="lost")
        if self._call.path == PATH:
            numbers = _NUMBER.findall(self._last)
            about = {
                "type": "error", "code": error.code, "message": error.message, "param": None,
                "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            }  # fmt: skip
            text = event(about, "error")
        else:
            text = event(error.body()) + DONE
        await self._send({"type": "http.response.body", "body": text.encode()})


async def _taken(said: AsyncIterator[Began | Messages], seconds: float) -> Began:
    """Who takes a request. Raises ApiError (503) where nobody does in time."""
    try:
        async with asyncio.timeout(seconds):
            began = await anext(said)
    except TimeoutError:
        raise ApiError(
            503, f"no replica took the request within {seconds:g} s; try again later",
            code="unavailable",
        ) from None  # fmt: skip
    assert isinstance(began, Began)
    return began


def _is_probe(call: Call) -> bool:
    return call.path.startswith("/health")


async def _body(receive: Receive) -> bytes:
    """The body, whole and in bounds: `Guard` has seen to it."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _object(body: bytes) -> dict[str, Any]:
    """A body that is JSON; what is no object is for a replica to refuse."""
    found = json.loads(body) if body else {}
    return found if isinstance(found, dict) else {}
