"""The end of a replica: what it says of all answers goes out here, a step's pieces together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from jackfield.errors import ExecutionError, error_text
from jackfield.replicas.calls import Call, ReplicaLostError, Reply
from jackfield.replicas.frames import WINDOW, Entry, Message, packed, read

logger = logging.getLogger("jackfield.serving")

REACHED_WITHIN = 10.0  # seconds

Send = Callable[[Any], Awaitable[None]]  # as ASGI has it
Place = tuple[str, int, bytes]


class Outgoing:
    """Brings answers to those who asked; `name` is that of the replica. Used in one event loop."""

    def __init__(self, name: str, encrypted: ssl.SSLContext | None = None) -> None:
        self._name, self._encrypted = name, encrypted
        self._connections: dict[Place, _Connection] = {}
        self._connecting = asyncio.Lock()

    async def bring(self, call: Call, answer: Callable[[Call, Send], Awaitable[None]]) -> None:
        """Say that the call is taken, what `answer` sends, and that it has ended.

        Cancelled where whoever asked is gone. Raises ExecutionError where it cannot be reached.
        """
        assert call.reply is not None
        number = call.reply.number
        connection = await self._connection(call.reply)
        with connection.carrying(number) as send:
            await send({"type": "began", "replica": self._name})
            end: Message = {"type": "ended", "why": None}
            try:
                await answer(call, send)
            except ReplicaLostError as error:
                end = {"type": "lost", "why": str(error)}
            except Exception as error:
                logger.exception("%s", call.id)
                end["why"] = error_text(error)
            await send(end)

    @property
    def busy(self) -> bool:
        """Whether answers are still brought."""
        return any(connection.busy for connection in self._connections.values())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    async def _connection(self, reply: Reply) -> _Connection:
        place = (reply.host, reply.port, reply.token)
        async with self._connecting:
            if place not in self._connections:
                found = await self._connected(reply)
                self._connections[place] = found
                found.reading.add_done_callback(lambda _: self._connections.pop(place, None))
            return self._connections[place]

    async def _connected(self, reply: Reply) -> _Connection:
        try:
            async with asyncio.timeout(REACHED_WITHIN):
                reader, writer = await asyncio.open_connection(
                    reply.host, reply.port, ssl=self._encrypted
                )
        except (OSError, TimeoutError) as error:
            raise ExecutionError(
                f"{self._name} does not reach the server in front at {reply.host}:{reply.port} "
                f"({error_text(error)}); open the ports between machines of the cluster"
            ) from None
        writer.write(reply.token)
        return _Connection(reader, writer)


class _Connection:
    """To one server in front, for all that it has asked."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._said: list[Entry] = []  # since the last frame
        self._untaken: dict[int, _Untaken] = {}
        self._carrying: set[asyncio.Task[Any]] = set()
        self.reading = asyncio.create_task(self._read(), name="jackfield-front")

    @property
    def busy(self) -> bool:
        return bool(self._carrying or self._said)

    @contextlib.contextmanager
    def carrying(self, number: int) -> Any:
        """How to send what answer `number` is."""
        untaken = self._untaken[number] = _Untaken()
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)

        async def send(message: Message) -> None:
            await untaken.below(WINDOW)
            untaken.bytes += len(message.get("body", b""))
            self._say(number, message)

        try:
            yield send
        finally:
            self._carrying.discard(task)
            del self._untaken[number]

    def _say(self, number: int, message: Message) -> None:
        if not self._said:  # whoever else is awake of this step says something before that is run
            asyncio.get_running_loop().call_soon(self._flush)
        self._said.append((number, message))

    def _flush(self) -> None:
        said, self._said = self._said, []
        if not self._writer.is_closing():
            self._writer.write(packed(said))

    async def _read(self) -> None:
        try:
            while True:
                for number, message in await read(self._reader):
                    if (untaken := self._untaken.get(number)) is not None:
                        untaken.take(message["bytes"])
        except (EOFError, OSError, ValueError) as error:
            logger.warning("the server in front is gone: %s", error_text(error))
        finally:
            self._writer.close()
            for task in self._carrying:
                task.cancel()

    def close(self) -> None:
        self.reading.cancel()


class _Untaken:
    """Bytes of an answer that are on their way, or wait for the client."""

    def __init__(self) -> None:
        self.bytes = 0
        self._fewer = asyncio.Event()

    async def below(self, most: int) -> None:
        while self.bytes >= most:
            self._fewer.clear()
            await self._fewer.wait()

    def take(self, count: int) -> None:
        self.bytes -= count
        self._fewer.set()
