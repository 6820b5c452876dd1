"""One connection to a server, of which each piece is stamped with the time when it came.

A client that measures must be cheap: pieces are kept as they are and read after the answer has
ended. httptools parses HTTP in C; an HTTP client in Python takes about as long for a piece as a
small model takes for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import httptools

from jackfield.client.address import CONNECT_WITHIN, Address


class CutOffError(ConnectionError):
    """The connection ended before the answer did."""


class _NothingCameError(CutOffError):
    """It ended before any byte of the answer."""


@dataclass
class Reply:
    """An answer: `pieces` of its body, each with the time when it came."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


class _Wire(asyncio.Protocol):
    """Hands what comes to a parser, and the parser's findings to the reply that is waited for."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.lost = False
        self._now = 0.0
        self._expect()

    def _expect(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.reply = Reply()
        self.ended: asyncio.Future[bool] | None = None

    def ask(self, data: bytes) -> asyncio.Future[bool]:
        """Send a request; True when the answer is whole and the connection may be used again."""
        self._expect()
        self.ended = asyncio.get_running_loop().create_future()
        self._now = 0.0
        self.transport.write(data)
        return self.ended

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(CutOffError("not HTTP"))
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self.reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(bool(self._parser.should_keep_alive()))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        kind = CutOffError if self._now else _NothingCameError
        self._end(kind("the connection was closed"))

    def _end(self, error: Exception) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(error)


class Wires:
    """Connections to one server, used again by the next request."""

    def __init__(self, address: Address, path: str, timeout: float) -> None:
        parts = address.parts
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._timeout = timeout
        self._free: list[_Wire] = []
        own = {"Host": parts.netloc, "Content-Type": "application/json", **address.headers}
        lines = [f"POST {parts.path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in own.items())]
        self._head = "\r\n".join(lines)

    async def post(self, body: bytes) -> Reply:
        """Send a body and wait until the answer has ended; again, where a kept connection has not.

        Raises OSError where there is no server, or the answer is cut off (`CutOffError`);
        TimeoutError where it takes longer than the timeout.
        """
        head = f"{self._head}\r\nContent-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        async with asyncio.timeout(self._timeout):
            while (wire := self._used()) is not None:
                # A server may close what it kept without a word, as llama.cpp's does.
                with contextlib.suppress(_NothingCameError):
                    return await self._ask(wire, request)
            return await self._ask(await self._connected(), request)

    async def _ask(self, wire: _Wire, request: bytes) -> Reply:
        usable = False
        try:
            usable = await wire.ask(request)
        finally:
            if usable:
                self._free.append(wire)
            else:
                wire.transport.abort()
        return wire.reply

    def _used(self) -> _Wire | None:
        while self._free:
            wire = self._free.pop()
            if not wire.lost and not wire.transport.is_closing():
                return wire
        return None

    async def _connected(self) -> _Wire:
        context = ssl.create_default_context() if self._secure else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_WITHIN):
            _, wire = await loop.create_connection(_Wire, self._host, self._port, ssl=context)
        return wire

    def close(self) -> None:
        for wire in self._free:
            wire.transport.abort()
        self._free.clear()
