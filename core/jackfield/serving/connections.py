"""Connections: how many there may be, and how long and how large the head of a request may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jackfield.serving.errors import ApiError
from jackfield.serving.settings import ServerSettings

MAX_HEAD = 64 * 1024  # bytes of a request line and its headers


def configured(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn's configuration of a server of `settings`."""
    return uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, int(settings.drain)),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        server_header=False,
    )


def protocol(settings: ServerSettings) -> type[Connection]:
    """uvicorn's protocol with the bounds of `settings`; uvicorn makes one for each connection."""
    bounds = {"most": settings.max_connections, "seconds": settings.receive_timeout}
    return type("Connection", (Connection,), bounds)


class Connection(HttpToolsProtocol):
    """One of a client; it is closed where a head does not come whole in time.

    Faults have OpenAI's error shape here, too. `most` connections may be open at once, and a head
    must come within `seconds`.
    """

    most: int
    seconds: float
    _late: asyncio.TimerHandle | None = None
    _head = 0  # bytes of a head that is not whole; what came with it of a body counts too

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            many = f"{self.most} connections are open already; try again later"
            self._refuse(ApiError(503, many))
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._in_time()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._late is not None:
            self._head += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._late is None and self.cycle.response_complete:
            self._wait()  # blank lines: nothing has begun, and nothing else waits any more
        elif self._late is not None and self._head > MAX_HEAD:
            self._refuse(ApiError(431, f"the headers have more than {MAX_HEAD} bytes"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _wait(self) -> None:
        """Hang up unless a head is whole in time."""
        self._in_time()
        self._late = self.loop.call_later(self.seconds, self.transport.close)

    def _in_time(self) -> None:
        self._head = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Answer beside the application, and hang up."""
        self._in_time()
        body = json.dumps(error.body()).encode()
        headers = {
            **error.headers, "content-type": "application/json", "connection": "close",
            "content-length": str(len(body)),
        }  # fmt: skip
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()
