"""What replicas say of many answers, over one connection each: nothing lost, nothing in the way."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import ExecutionError, UsageError
from jackfield.replicas import receiving, sending
from jackfield.replicas.calls import Began, Call, ReplicaLostError, Reply
from jackfield.replicas.encryption import channel, context
from jackfield.replicas.frames import WINDOW, packed
from jackfield.replicas.receiving import Answer, Incoming
from jackfield.replicas.sending import Outgoing, Send

HEADERS = [(b"content-type", b"text/plain"), (b"x-odd", bytes(range(160, 256)))]
START = {"type": "http.response.start", "status": 200, "headers": HEADERS}


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 60))


def call(answer: Answer) -> Call:
    return Call("id", "POST", "/", b"", (), b"", reply=answer.reply)


def body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def all_of(answer: Answer) -> list[dict[str, Any]]:
    return [message async for said in answer if not isinstance(said, Began) for message in said]


@dataclass
class Pair:
    """One server in front and its replicas."""

    incoming: Incoming = field(default_factory=lambda: Incoming("127.0.0.1"))
    outgoing: list[Outgoing] = field(default_factory=lambda: [Outgoing("r0"), Outgoing("r1")])

    def bring(self, answer: Answer, work: Any, replica: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(self.outgoing[replica].bring(call(answer), work))

    def hang_up(self, replica: int) -> None:
        """As the end of its process would."""
        for connection in self.outgoing[replica]._connections.values():
            connection._writer.transport.abort()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    found = Pair()
    try:
        yield found
    finally:
        for outgoing in found.outgoing:
            outgoing.close()
        found.incoming.close()
        await asyncio.sleep(0)


def test_many_answers_come_whole_and_in_order() -> None:
    """Of two replicas, of all sizes, sent and read at odd moments."""

    async def act() -> None:
        async with pair() as made:

            async def one(number: int) -> None:
                draw = random.Random(number)
                sizes = [0, 1, 7, 200, 5000, WINDOW // 3, WINDOW + 1]
                told = [START] + [
                    body(draw.randbytes(draw.choice(sizes[: draw.randint(1, 7)])))
                    for _ in range(draw.randrange(40))
                ]

                async def work(_: Call, send: Send) -> None:
                    for message in told:
                        await send(dict(message))
                        if draw.random() < 0.5:
                            await asyncio.sleep(draw.choice([0, 0, 0.001]))

                async with made.incoming.opened() as answer:
                    bringing = made.bring(answer, work, number % 2)
                    read = []
                    async for said in answer:
                        assert isinstance(said, Began) == (not read)
                        read += [said] if isinstance(said, Began) else said
                        await asyncio.sleep(0)
                    await bringing
                    assert read == [Began(f"r{number % 2}"), *told]

            await asyncio.gather(*(one(number) for number in range(60)))

    run(act())


def test_the_pieces_of_a_step_go_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = []

    async def read(reader: asyncio.StreamReader) -> Any:
        frames.append(found := await plain(reader))
        return found

    async def act() -> None:
        async with pair() as made, contextlib.AsyncExitStack() as stack:
            step, ready = asyncio.Condition(), asyncio.Semaphore(0)

            async def work(_: Call, send: Send) -> None:
                for _ in range(steps):
                    async with step:
                        ready.release()
                        await step.wait()
                    await send(body(b"piece"))

            answers = [await stack.enter_async_context(made.incoming.opened()) for _ in range(40)]
            bringing = [made.bring(answer, work) for answer in answers]
            reading = [asyncio.create_task(all_of(answer)) for answer in answers]
            for _ in range(steps):
                for _ in answers:
                    await ready.acquire()
                async with step:
                    step.notify_all()
            for read_ in reading:
                assert await read_ == [body(b"piece")] * steps
            await asyncio.gather(*bringing)

    steps, plain = 50, receiving.read
    monkeypatch.setattr(receiving, "read", read)
    run(act())
    pieces = sum(m["type"] == "http.response.body" for frame in frames for _, m in frame)
    assert pieces == 40 * steps
    # those of a step wake one after the other, and so may meet in a few frames
    assert len(frames) < pieces / 8, len(frames)


def test_a_reader_that_waits_holds_back_its_own_answer_alone() -> None:
    async def act() -> None:
        sent = 0

        async def much(_: Call, send: Send) -> None:
            nonlocal sent
            for _ in range(100):
                await send(body(b"x" * 16384))
                sent += 16384

        async with pair() as made, made.incoming.opened() as slow:
            bringing = made.bring(slow, much)
            for _ in range(50):  # others come and go meanwhile

                async def little(_: Call, send: Send) -> None:
                    await send(body(b"y"))

                async with made.incoming.opened() as quick:
                    task = made.bring(quick, little)
                    assert await all_of(quick) == [body(b"y")]
                    await task
            assert not bringing.done()
            assert sent == WINDOW
            assert await all_of(slow) == [body(b"x" * 16384)] * 100  # once it reads
            await bringing

    run(act())


async def _begun(made: Pair, answer: Answer, replica: int) -> tuple[asyncio.Task[None], Any]:
    """An answer that has begun, and does not end."""

    async def work(_: Call, send: Send) -> None:
        await send(body(b"first"))
        await asyncio.sleep(1000)

    bringing, reading = made.bring(answer, work, replica), answer.__aiter__()
    said: list[Any] = []
    while len(said) < 2:
        one = await anext(reading)
        said += [one] if isinstance(one, Began) else one
    assert said == [Began(f"r{replica}"), body(b"first")]
    return bringing, reading


def test_a_replica_that_is_gone_ends_all_its_answers_and_no_other() -> None:
    async def act() -> None:
        async with pair() as made, contextlib.AsyncExitStack() as stack:
            begun = [
                await _begun(made, await stack.enter_async_context(made.incoming.opened()), n % 2)
                for n in range(20)
            ]
            made.hang_up(0)
            for bringing, reading in begun[::2]:
                with pytest.raises(ReplicaLostError, match="connection"):
                    await anext(reading)
                with pytest.raises(asyncio.CancelledError):  # nobody would read it
                    await bringing
            assert not any(bringing.done() for bringing, _ in begun[1::2])
            for bringing, _ in begun[1::2]:
                bringing.cancel()
            # it is there again: the next answer makes a connection anew
            async with made.incoming.opened() as answer:
                bringing, _ = await _begun(made, answer, 0)
                bringing.cancel()

    run(act())


def test_a_server_in_front_that_is_gone_ends_what_it_asked() -> None:
    async def act() -> None:
        async with pair() as made, made.incoming.opened() as answer:
            bringing, reading = await _begun(made, answer, 0)
            made.incoming.close()
            with pytest.raises(asyncio.CancelledError):
                await bringing
            with pytest.raises(ReplicaLostError):
                await anext(reading)
            assert not made.outgoing[0]._connections

    run(act())


def test_what_is_given_up_is_dropped() -> None:
    async def act() -> None:
        went_on, more = asyncio.Event(), asyncio.Event()

        async def work(_: Call, send: Send) -> None:
            await send(body(b"1"))
            await more.wait()
            await send(body(b"2"))
            went_on.set()

        async with pair() as made:
            async with made.incoming.opened() as answer:
                bringing = made.bring(answer, work)
                assert isinstance(await anext(answer.__aiter__()), Began)
            more.set()
            await asyncio.wait_for(went_on.wait(), 10)
            await bringing
            async with made.incoming.opened() as other:  # over the same connection
                bringing = made.bring(other, work)
                assert await all_of(other) == [body(b"1"), body(b"2")]
                await bringing

    run(act())


def certificates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a cluster of Ray."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=ray", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(cert))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(key))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(cert))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_where_the_cluster_has_tls_answers_have_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert context(ssl.PROTOCOL_TLS_SERVER) is None
    certificates(tmp_path, monkeypatch)
    incoming = Incoming("127.0.0.1", context(ssl.PROTOCOL_TLS_SERVER))
    good, plain = Outgoing("r0", context(ssl.PROTOCOL_TLS_CLIENT)), Outgoing("r1")
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts, and shows nothing
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    made = Pair(incoming, [good, plain, Outgoing("r2", nobody)])

    async def act() -> None:
        async def work(_: Call, send: Send) -> None:
            await send(body(b"hidden"))

        async with incoming.opened() as answer:
            task = made.bring(answer, work)
            assert await all_of(answer) == [body(b"hidden")]
            await task
        for replica in (1, 2):
            async with incoming.opened() as answer:
                task = made.bring(answer, work, replica)
                await asyncio.wait({task}, timeout=1.0)
                assert not answer._messages
                task.cancel()
        for outgoing in made.outgoing:
            outgoing.close()
        incoming.close()

    run(act())
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"RAY_TLS_CA_CERT.*no good"):
        context(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(UsageError, match=r"RAY_TLS_CA_CERT.*no good"):
        channel(None, "127.0.0.1:1")


def test_an_error_of_the_application_is_told() -> None:
    async def act() -> None:
        async def work(_: Call, send: Send) -> None:
            await send(body(b"1"))
            raise ValueError("no more of this")

        async with pair() as made, made.incoming.opened() as answer:
            await made.bring(answer, work)
            reading = answer.__aiter__()
            assert isinstance(await anext(reading), Began)
            assert await anext(reading) == [body(b"1")]
            with pytest.raises(ExecutionError, match="no more of this"):
                await anext(reading)

    run(act())


def test_a_server_in_front_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        async with pair() as made, made.incoming.opened() as answer:
            made.incoming.close()
            await asyncio.sleep(0.1)
            with pytest.raises(
                ExecutionError, match=rf"r0 does not .*127.0.0.1:{answer.reply.port}"
            ):
                await made.bring(answer, None)

    monkeypatch.setattr(sending, "REACHED_WITHIN", 2.0)
    run(act())


@pytest.mark.parametrize("kind", ["token", "nothing", "half", "junk", "shape", "long", "silent"])
def test_who_does_not_belong_is_sent_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonsense ends the connection on which it comes, and what came over it."""
    monkeypatch.setattr(receiving, "_NAMED_WITHIN", 0.2)

    async def act() -> None:
        async with pair() as made, made.incoming.opened() as answer, \
                made.incoming.opened() as other:  # fmt: skip
            bringing, reading = await _begun(made, other, 1)
            at: Reply = answer.reply
            reader, writer = await asyncio.open_connection(at.host, at.port)
            begins = packed([(at.number, {"type": "began", "replica": "r9"})])
            wrong = at.token[:-1] + bytes([at.token[-1] ^ 1])
            writer.write({
                "token": wrong + begins, "nothing": b"", "half": at.token + begins[:-3],
                "junk": at.token + b"\0\0\0\2\0\0\0\0[[", "long": at.token + b"\xff" * 8,
                "shape": at.token + b"\0\0\0\6\0\0\0\0[[1,2]", "silent": at.token[:5],
            }[kind])  # fmt: skip
            if kind not in ("nothing", "silent"):
                writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            assert not answer._messages
            assert not bringing.done()
            bringing.cancel()
            del reading

    run(act())
