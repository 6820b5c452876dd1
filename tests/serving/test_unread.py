"""Answers that nobody takes end, and those that somebody takes slowly do not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from test_load import at_rest
from test_process import pair
from uvicorn.server import ServerState

from jackfield.serving.connections import protocol
from jackfield.serving.metrics import Metrics
from jackfield.serving.settings import settings

if TYPE_CHECKING:
    from served import Served

uvloop = pytest.importorskip("uvloop", reason="needs jackfield[serve]")

WITHIN = 0.4  # seconds
ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
PIECE = b"x" * 50_000


class Endless:
    """An application that streams until its client is gone; `parts` of them, if a number."""

    def __init__(self, parts: int | None) -> None:
        self.parts, self.sent, self.left = parts, 0, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while self.sent != self.parts:
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.sent += 1
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        self.left.set()


def small(listening: Any) -> None:
    """Little is kept by the system of what goes to those whom it accepts."""
    with socket.socket(fileno=os.dup(listening.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def run(act: Coroutine[Any, Any, Any], loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(act, 30))


async def asked(
    app: Any,
    metrics: Metrics,
    read: Callable[[socket.socket], Any],
    certificate: tuple[str, str] | None = None,
    within: float = WITHIN,
    *,
    little: bool = False,
) -> Any:
    """What `read` does with a connection on which an answer of `app` has been asked for."""
    ours, theirs = None, None
    if certificate is not None:
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.load_cert_chain(*certificate)
        theirs = ssl.create_default_context(cafile=certificate[0])
    loop, config = asyncio.get_running_loop(), uvicorn.Config(app, log_config=None)
    made = protocol(settings(write_timeout=within), metrics)
    server = await loop.create_server(
        lambda: made(config=config, server_state=ServerState(), app_state={}),
        "127.0.0.1", 0, ssl=ours,
    )  # fmt: skip
    if little:
        small(server.sockets[0])
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096 if little else 20_000)

    def act() -> Any:
        plain.connect(server.sockets[0].getsockname())
        own = theirs.wrap_socket(plain, server_hostname="localhost") if theirs else plain
        with own as client:
            client.sendall(ASK)
            return read(client)

    found = await asyncio.to_thread(act)
    server.close()
    return found


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.one_in(4)
def test_an_answer_that_nobody_takes_ends(
    loop: Callable[[], Any], secure: bool, tmp_path: Path
) -> None:
    metrics = Metrics()
    certificate = pair(tmp_path, "own") if secure else None

    async def act() -> None:
        app, left = Endless(None), threading.Event()
        asking = asyncio.create_task(asked(app, metrics, lambda _: left.wait(20), certificate))
        await app.left.wait()
        left.set()
        await asking

    began = time.monotonic()
    run(act(), loop)
    assert WITHIN <= time.monotonic() - began < 10 * WITHIN
    assert b"jackfield_unread_answers_total 1.0" in metrics.show()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_end_of_an_answer_that_nobody_takes_is_not_kept(loop: Callable[[], Any]) -> None:
    """Less than what pauses a stream, behind what the system has taken."""
    metrics, paused = Metrics(), []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 60_000})
        paused.append(send.__self__.flow.write_paused)

    run(asked(answer, metrics, lambda client: time.sleep(4 * WITHIN), little=True), loop)
    assert b"jackfield_unread_answers_total 1.0" in metrics.show()
    assert paused == [False]


@pytest.mark.parametrize(
    ("loop", "secure"), [(asyncio.new_event_loop, False), (uvloop.new_event_loop, True)]
)
def test_who_reads_slowly_is_served(loop: Callable[[], Any], secure: bool, tmp_path: Path) -> None:
    metrics, count, within = Metrics(), 200, 1.0
    certificate = pair(tmp_path, "own") if secure else None

    def read(client: socket.socket) -> int:
        """In steps, each well within the time; all of them take several times as long."""
        whole, until = 0, time.monotonic() + 3 * within
        while piece := client.recv(1 << 20 if time.monotonic() > until else 30_000):
            whole += len(piece)
            if piece.endswith(b"0\r\n\r\n"):
                return whole
            if time.monotonic() < until:
                time.sleep(within / 15)
        return whole

    async def act() -> int:
        return int(await asked(Endless(count), metrics, read, certificate, within))

    assert run(act(), loop) > count * len(PIECE)
    assert b"jackfield_unread_answers_total 0.0" in metrics.show()


def test_who_reads_late_what_the_system_took_has_it_all(
    serve: Callable[..., Served],
) -> None:
    served = serve(write_timeout=0.2)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        for _ in range(2):
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.8)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += client.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(65536)
            assert json.loads(body)["openapi"]


def test_a_stream_that_nobody_takes_gives_back_what_it_held(serve: Callable[..., Served]) -> None:
    served = serve(write_timeout=0.3, stream_interval=0)
    rest = at_rest(served)
    small(served.server.servers[0].sockets[0])
    host, port = served.url.removeprefix("http://").split(":")
    asked = json.dumps({
        "model": "demo", "prompt": "One day", "max_tokens": 200, "stream": True, "n": 4,
        "logprobs": 5, "temperature": 1, "seed": 1, "logit_bias": {"0": -100},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect((host, int(port)))
        client.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        until = time.monotonic() + 60
        while "unread_answers_total 1.0" not in httpx.get(f"{served.url}/metrics").text:
            assert time.monotonic() < until
            time.sleep(0.05)
        found = at_rest(served)
        assert {**found, "threads": ()} == {**rest, "threads": ()}
