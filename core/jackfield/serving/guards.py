"""What stands before the endpoints: bounds on bodies and on how many are answered, keys, hosts.

Pure ASGI, so that a client that goes away is heard of, and streams are not copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from jackfield.serving.errors import ApiError, refused, told
from jackfield.serving.json_bodies import read_json
from jackfield.serving.keys import Keys
from jackfield.serving.metrics import Metrics
from jackfield.serving.settings import ServerSettings

logger = logging.getLogger("jackfield.serving")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PRINTABLE = re.compile(r"[!-~]{1,128}")
_PORT = re.compile(r":\d*$")


def header(scope: Scope, name: bytes) -> str | None:
    found = (value for key, value in scope["headers"] if key == name)
    value = next(found, None)
    return None if value is None else value.decode("latin-1")


class Guard:
    """Lets in what may be let in, answers the rest with an error, counts and logs each request.

    What it finds out is in the scope's state: `id`, `client_id` (the client's own X-Request-ID) and
    `owner` (whose key it is).
    """

    def __init__(self, app: App, settings: ServerSettings, keys: Keys, metrics: Metrics) -> None:
        self._app, self._settings, self._keys, self._metrics = app, settings, keys, metrics
        self._open = 0
        hosts = {"localhost", "127.0.0.1", "[::1]", settings.host, f"[{settings.host}]"}
        hosts = {host.lower() for host in (*hosts, *settings.allowed_hosts)}
        # Another site's page can have a browser call this machine under a name of that site's.
        named = settings.is_loopback or settings.allowed_hosts
        self._hosts = hosts if named and "*" not in hosts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = scope.setdefault("state", {})
        own["began"] = time.perf_counter()
        own.setdefault("id", uuid.uuid4().hex)  # it has one where another process handed it on
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
        except Exception as error:
            found = told(error)
            if status:
                raise  # the answer has begun; all that is left is to cut it off
            await answer_error(found, answer)
        finally:
            self._count(scope, own, status)
            _log(scope, own, status)

    def _count(self, scope: Scope, own: dict[str, Any], status: int) -> None:
        """Under names that clients cannot make up."""
        model = own.get("said", {}).get("model", "")
        self._metrics.answered(
            getattr(scope.get("route"), "path", "other"),
            model if model in self._settings.models else "", status,
        )  # fmt: skip

    @contextlib.contextmanager
    def _let_in(self, scope: Scope, own: dict[str, Any]) -> Iterator[None]:
        path = scope["path"]
        self._check_host(scope)
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

    def _check_host(self, scope: Scope) -> None:
        if self._hosts is None:
            return
        given = (header(scope, b"host") or "localhost").lower()
        if given not in self._hosts and _PORT.sub("", given) not in self._hosts:
            raise refused(
                "this server answers only under its own address; allowed_hosts in its settings "
                "names others", None, "host_not_allowed",
            )  # fmt: skip

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The body, read whole where there is one: in time, small, shallow, and JSON."""
        if scope["method"] != "POST" or not _has_body(scope):
            return receive
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise ApiError(415, "send the body as JSON, with Content-Type: application/json")
        if (encoding := header(scope, b"content-encoding")) not in (None, "", "identity"):
            raise ApiError(415, f"send the body as it is, not with Content-Encoding: {encoding}")
        try:
            async with asyncio.timeout(self._settings.receive_timeout):
                body = await self._whole(receive)
        except TimeoutError:
            seconds = self._settings.receive_timeout
            raise ApiError(408, f"the body did not come within {seconds:g} s") from None
        read_json(body, self._settings.max_depth)
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again

    async def _whole(self, receive: Receive) -> bytes:
        most, body = self._settings.max_body, bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise refused("the body did not come whole", None)
            body += message.get("body", b"")
            if len(body) > most:
                raise ApiError(413, f"the body has more than {most} bytes")
            if not message.get("more_body"):
                return bytes(body)


def _has_body(scope: Scope) -> bool:
    length = header(scope, b"content-length") or "0"
    return length.strip("0") != "" or header(scope, b"transfer-encoding") is not None


async def answer_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    if error.status in (408, 413):  # what is still to come of the body is not read
        headers.append((b"connection", b"close"))
    headers += [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _log(scope: Scope, own: dict[str, Any], status: int) -> None:
    """One line of JSON; no prompt and no answer is in it, but where `log_texts` is on.

    Probes that come every few seconds, and the page's figures, are not told while they are well.
    """
    well = status < 400 and scope["path"].startswith(("/health", "/metrics", "/v1/report"))
    if well or not logger.isEnabledFor(logging.INFO):
        return
    line = {
        "event": "request", "id": own["id"], "client_id": own["client_id"],
        "key": own.get("owner") or None, "method": scope["method"], "path": scope["path"],
        "status": status or None, "seconds": round(time.perf_counter() - own["began"], 4),
        **own.get("said", {}),
    }  # fmt: skip
    logger.info("%s", json.dumps(line))
