"""What stands before the endpoints: bounds on bodies and on how many are answered, keys, hosts.

Pure ASGI, so that a client that goes away is heard of, and streams are not copied.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from jackfield.serving.errors import ApiError, refused
from jackfield.serving.keys import Keys
from jackfield.serving.settings import ServerSettings

logger = logging.getLogger("jackfield.serving")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(rb"[\[{]|[\]}]")
_PRINTABLE = re.compile(r"[!-~]{1,128}")


def header(scope: Scope, name: bytes) -> str | None:
    found = (value for key, value in scope["headers"] if key == name)
    value = next(found, None)
    return None if value is None else value.decode("latin-1")


def depth_of(body: bytes) -> int:
    """How deep JSON is nested, without reading it."""
    deepest = depth = 0
    for match in _BRACKETS.finditer(_STRING.sub(b"", body)):
        depth += 1 if match.group() in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


class Guard:
    """Lets in what may be let in, answers the rest with an error, writes a line a request.

    What it finds out is in the scope's state: `id`, `client_id` (the client's own X-Request-ID) and
    `owner` (whose key it is).
    """

    def __init__(self, app: App, settings: ServerSettings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._open = 0
        hosts = {"localhost", "127.0.0.1", "[::1]", settings.host, *settings.allowed_hosts}
        # Another site's page can have a browser call this machine under a name of that site's.
        self._hosts = hosts if settings.is_loopback and "*" not in hosts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = scope.setdefault("state", {})
        own["id"], own["began"] = uuid.uuid4().hex, time.perf_counter()
        theirs = header(scope, b"x-request-id") or ""
        own["client_id"] = theirs if _PRINTABLE.fullmatch(theirs) else None
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", (own["client_id"] or own["id"]).encode()),
                ]
            await send(message)

        try:
            with self._let_in(scope, own):
                await self._app(scope, await self._bounded(scope, receive), answer)
        except ApiError as error:
            await answer_error(error, answer)
        finally:
            _log(scope, own, status)

    @contextlib.contextmanager
    def _let_in(self, scope: Scope, own: dict[str, Any]) -> Any:
        path = scope["path"]
        if self._hosts is not None:
            host = (header(scope, b"host") or "localhost").rsplit(":", 1)[0]
            if host not in self._hosts and (header(scope, b"host") or "") not in self._hosts:
                raise refused("this server answers only under its own address", None)
        own["owner"] = ""
        guarded = path.startswith("/v1/") or path == "/metrics"
        if guarded and scope["method"] != "OPTIONS":
            own["owner"] = self._keys.owner(header(scope, b"authorization"))
        if scope["method"] != "POST":
            yield
            return
        self._keys.count(own["owner"])
        if self._open >= self._settings.max_requests:
            raise ApiError(429, f"{self._open} requests are open already; try again later")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The body, read whole where there is one: small, shallow, and declared to be JSON."""
        if scope["method"] != "POST":
            return receive
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise refused("send the body as JSON, with Content-Type: application/json", None)
        most, body = self._settings.max_body, bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise refused("the body did not come whole", None)
            body += message.get("body", b"")
            if len(body) > most:
                raise ApiError(413, f"the body has more than {most} bytes")
            if not message.get("more_body"):
                break
        if depth_of(bytes(body)) > self._settings.max_depth:
            raise refused(f"the body is nested deeper than {self._settings.max_depth}", None)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again


async def answer_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    headers += [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _log(scope: Scope, own: dict[str, Any], status: int) -> None:
    """One line of JSON; no text of anybody's is in it."""
    if not logger.isEnabledFor(logging.INFO):
        return
    line = {
        "event": "request", "id": own["id"], "client_id": own["client_id"],
        "key": own.get("owner") or None, "method": scope["method"], "path": scope["path"],
        "status": status or None, "seconds": round(time.perf_counter() - own["began"], 4),
        **own.get("said", {}),
    }  # fmt: skip
    logger.info("%s", json.dumps(line))
