"""The end in front: what all replicas say of all answers comes in here, each its own way on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator

from jackfield.errors import ExecutionError, error_text
from jackfield.replicas.calls import Began, Messages, ReplicaLostError, Reply
from jackfield.replicas.frames import WINDOW, Message, packed, read

_NAMED_WITHIN = 5.0  # seconds for who connects to show its token


class Incoming:
    """Where replicas bring their answers: one connection for each, which lasts.

    Nobody waits for a client that does not read: what comes for it waits by itself, `WINDOW` bytes
    of it, then its replica holds back that answer alone. Used in one event loop.
    """

    def __init__(self, host: str, encrypted: ssl.SSLContext | None = None) -> None:
        self._host, self._encrypted = host, encrypted
        self._token = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._answers: dict[int, Answer] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def _listening(self) -> asyncio.Server:
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(
                    self._receive, self._host, 0, ssl=self._encrypted
                )
            return self._server

    def close(self) -> None:
        """Hang up: the replicas give up what they make."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Answer]:
        """One that is asked for now; what comes of it after the block is dropped."""
        server = await self._listening()
        host, port = server.sockets[0].getsockname()[:2]
        number = next(self._numbers)
        answer = self._answers[number] = Answer(Reply(host, port, self._token, number))
        try:
            yield answer
        finally:
            del self._answers[number]

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "its connection has ended"
        self._writers.add(writer)
        try:
            async with asyncio.timeout(_NAMED_WITHIN):
                token = await reader.readexactly(len(self._token))
            if secrets.compare_digest(token, self._token):
                while True:
                    for number, message in await read(reader):
                        if (answer := self._answers.get(number)) is not None:
                            answer.put(message, writer)
        except (EOFError, TimeoutError):
            pass
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"its connection has ended: {error_text(error)}"
        finally:
            for answer in self._answers.values():
                if answer.writer is writer:
                    answer.fail(ReplicaLostError(why))
            self._writers.discard(writer)
            writer.close()


class Answer:
    """What comes of one call, in the order in which it was said."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.writer: asyncio.StreamWriter | None = None  # to the replica that has taken it
        self._messages: deque[Message] = deque()
        self._failure: Exception | None = None
        self._come = asyncio.Event()
        self._ended = False
        self._taken = 0  # bytes of which the replica has not been told

    def put(self, message: Message, writer: asyncio.StreamWriter) -> None:
        """Of the replica behind `writer`."""
        self.writer = writer
        if message["type"] == "lost":
            self.fail(ReplicaLostError(message["why"]))
            return
        self._messages.append(message)
        self._come.set()

    def fail(self, error: Exception) -> None:
        """Nothing more comes, for this reason; what has come is still handed out."""
        self._failure = self._failure or error
        self._come.set()

    async def __aiter__(self) -> AsyncIterator[Began | Messages]:
        """Who takes it, then the answer as it comes. Raises ReplicaLostError, or as `fail` says."""
        while not self._ended:
            await self._come.wait()
            self._come.clear()
            if self._messages and self._messages[0]["type"] == "began":
                yield Began(self._messages.popleft()["replica"])
            if messages := self._all_that_came():
                yield messages
                self._tell_taken(messages)
            if self._failure is not None and not self._messages:
                raise self._failure

    def _all_that_came(self) -> Messages:
        found = list(self._messages)
        self._messages.clear()
        if found and found[-1]["type"] == "ended":
            if (why := found.pop()["why"]) is None:
                self._ended = True
            else:
                self.fail(ExecutionError(why))
        return found

    def _tell_taken(self, messages: Messages) -> None:
        """Have the replica go on; it is told seldom, since a short answer never waits."""
        self._taken += sum(len(message.get("body", b"")) for message in messages)
        if self._taken >= WINDOW // 2 and self.writer is not None:
            told = {"type": "taken", "bytes": self._taken}
            self.writer.write(packed([(self.reply.number, told)]))
            self._taken = 0
