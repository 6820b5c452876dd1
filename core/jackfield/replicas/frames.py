"""What goes over a connection of a server in front and a replica: frames of messages.

A frame has what a step made for all answers, so that it costs a system call, not one for each.
Nothing that comes is code, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable
from typing import Any

#: One of ASGI that an application sends, or one of ours: `began`, `ended`, `lost`, `taken`.
Message = dict[str, Any]
Entry = tuple[int, Message]  # the number of an answer, and what is said of it

#: Bytes of an answer that may be on their way, or wait for the client, before its replica waits.
WINDOW = 256 * 1024
_LENGTHS = struct.Struct("!II")  # of the messages as JSON, and of their bodies
_MOST = 1 << 30  # bytes of one frame


def packed(entries: Iterable[Entry]) -> bytes:
    """One frame."""
    heads, bodies = [], []
    for number, message in entries:
        body = message.get("body", b"")
        head = {name: value for name, value in message.items() if name != "body"}
        if "headers" in head:
            head["headers"] = [
                (k.decode("latin-1"), v.decode("latin-1")) for k, v in head["headers"]
            ]
        heads.append((number, head, len(body)))
        bodies.append(body)
    text, rest = json.dumps(heads, separators=(",", ":")).encode(), b"".join(bodies)
    return _LENGTHS.pack(len(text), len(rest)) + text + rest


async def read(reader: asyncio.StreamReader) -> list[Entry]:
    """The next frame. Raises EOFError or OSError where the other end is gone, ValueError for what
    is no frame.
    """
    heads, rest = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if heads + rest > _MOST:
        raise ValueError(f"a frame of {heads + rest} bytes")
    text, bodies = await reader.readexactly(heads), await reader.readexactly(rest)
    found, begin = [], 0
    for number, message, length in json.loads(text):
        if "headers" in message:
            message["headers"] = [
                (k.encode("latin-1"), v.encode("latin-1")) for k, v in message["headers"]
            ]
        if length or message["type"] == "http.response.body":
            message["body"] = bodies[begin : begin + length]
        found.append((number, message))
        begin += length
    return found
