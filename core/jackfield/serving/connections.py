"""Connections: how many there may be, and how late and how large a head may come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from array import array
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jackfield.serving.errors import ApiError
from jackfield.serving.metrics import Metrics
from jackfield.serving.settings import ServerSettings

if sys.platform == "linux":
    import fcntl
    import termios

logger = logging.getLogger("jackfield.serving")

MAX_HEAD = 64 * 1024  # bytes of a request line and its headers


def configured(app: Any, settings: ServerSettings, metrics: Metrics) -> uvicorn.Config:
    """uvicorn's configuration of a server of `settings`."""
    return uvicorn.Config(
        app,
        http=protocol(settings, metrics),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, int(settings.drain)),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        server_header=False,
    )


def protocol(settings: ServerSettings, metrics: Metrics) -> type[Connection]:
    """uvicorn's protocol with the bounds of `settings`; uvicorn makes one for each connection."""
    bounds = {
        "most": settings.max_connections, "receive_timeout": settings.receive_timeout,
        "write_timeout": settings.write_timeout, "metrics": metrics,
    }  # fmt: skip
    return type("Connection", (Connection,), bounds)


class Connection(HttpToolsProtocol):
    """One of a client: closed where a head does not come whole, or nothing is taken, in time.

    Faults have OpenAI's error shape here, too. `most` connections may be open at once. A head must
    come within `receive_timeout` seconds. Where an answer waits, the client's system must take some
    of it every `write_timeout` seconds; whether anybody reads there is not seen from here.
    """

    most: int
    receive_timeout: float
    write_timeout: float
    metrics: Metrics
    _late: asyncio.TimerHandle | None = None
    _head = 0  # bytes of a head that is not whole; what came with it of a body counts too
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            many = f"{self.most} connections are open already; try again later"
            self._refuse(ApiError(503, many))
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._read()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._read()
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

    def pause_writing(self) -> None:
        """So much waits for the client that nothing more is written."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # the last one that was asked for
            self._wait_for_reader()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _wait(self) -> None:
        """Hang up unless a head is whole in time."""
        self._in_time()
        self._late = self.loop.call_later(self.receive_timeout, self.transport.close)

    def _in_time(self) -> None:
        self._head = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _wait_for_reader(self) -> None:
        """Hang up if nothing is taken of what waits. Nothing may be written before `_read`."""
        self._read()
        if self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(self.write_timeout, self._look, self._untaken())

    def _look(self, before: int) -> None:
        if not self.transport.get_write_buffer_size() or self._untaken() < before:
            self._wait_for_reader()
            return
        self.metrics.unread.inc()
        logger.info(
            "a client takes nothing of its answer for %g s; its connection is closed",
            self.write_timeout,
        )
        self.transport.abort()

    def _untaken(self) -> int:
        """Bytes that wait here, and in this system for that of the client.

        The latter are told on Linux alone. There a buffer of megabytes is written to only when a
        third of it is free, so that a slow reader would seem to read nothing for a long time.
        """
        count = array("i", [0])
        if sys.platform == "linux":
            with contextlib.suppress(OSError, ValueError):  # of what is no TCP, or is closed
                fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, count)
        return self.transport.get_write_buffer_size() + count[0]

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
