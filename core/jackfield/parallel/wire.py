"""A connection of two processes: messages of JSON, each behind its length."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!I")
MOST = 1 << 30  # bytes of a message


class Wire:
    """One end of a connection. Several threads may send; one receives.

    Nothing that comes is code, and nothing is unpickled.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        with contextlib.suppress(OSError):  # a message is not to wait for more
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """Raises OSError where nobody is there any more."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self, seconds: float | None = None) -> Any:
        """The next message, waiting for `seconds` at most (None: for ever).

        Raises EOFError where the other end is gone, TimeoutError, and ValueError for what is no
        message.
        """
        self._socket.settimeout(seconds)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MOST:
            raise ValueError(f"a message of {length} bytes")
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                part = self._socket.recv(min(count - len(found), 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:  # the other process was killed
                raise EOFError(str(error)) from error
            if not part:
                raise EOFError("the connection is closed")
            found += part
        return bytes(found)

    def finish(self) -> None:
        """Say no more: the other end reads what is on its way, and then that this is the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Also wakes whoever receives in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
