"""Answers as they go over the wire: server-sent events, or one JSON object from the same chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import StreamingResponse

from jackfield.serving.errors import told
from jackfield.serving.schema.common import as_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from jackfield.serving.runs import Run

T = TypeVar("T")
Wire = Callable[[AsyncIterator[Any]], AsyncIterator[str]]
DONE = "data: [DONE]\n\n"


class Events(StreamingResponse):
    """A run's chunks as events; the run is closed when the client goes, however early."""

    media_type = "text/event-stream"

    def __init__(self, run: Run, chunks: AsyncIterator[str]) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.close()


def event(data: Any, name: str | None = None) -> str:
    """One event of a stream; `data` is JSON, or a text that is JSON already."""
    text = data if isinstance(data, str) else as_json(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


async def stream(chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    """The chunks as events, an error as the last of them, and the end, which always comes."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except Exception as error:  # noqa: BLE001 - whoever reads a stream is told of its end
        yield event(told(error).body())
    yield DONE


async def typed_stream(chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Chunks that have a type, which is the name of the event; the last of them is the end."""
    async for chunk in chunks:
        yield event(chunk, chunk["type"])


async def unless_gone(request: Request, act: Awaitable[T]) -> T | None:
    """What is awaited; None, and it is cancelled: the client went away meanwhile."""
    work = asyncio.ensure_future(act)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
