"""A server of bytes: what it answers, and when, is written down by a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Step = bytes | float
Script = Callable[[str, dict[str, Any]], list[Step]]
"""What is done for a path and a body: bytes are sent, numbers are seconds to wait."""


@dataclass
class Fake:
    """`bodies` are those that came, `most` how many were open at once."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    open: int = 0
    most: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if
                     line.startswith("content-length:")), 0,
                )  # fmt: skip
                body = json.loads(await reader.readexactly(length) or b"{}")
                self.heads.append(head)
                self.bodies.append(body)
                self.open += 1
                self.most = max(self.most, self.open)
                await self._play(self.script(head.split(" ")[1], body), writer)
                self.open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _play(self, steps: list[Step], writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif not step:
                raise ConnectionError  # an empty piece: hang up
            else:
                writer.write(step)
                await writer.drain()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def said(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


def counted(prompt: int, made: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": made})


DONE = chunk(b"data: [DONE]\n\n")


def plain(status: str, content: Any, kind: str = "application/json") -> list[Step]:
    """A whole answer; `content` is bytes, or goes out as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return [head.encode() + data]


def models(*names: str) -> list[Step]:
    return plain("200 OK", {"object": "list", "data": [{"id": name} for name in names]})
