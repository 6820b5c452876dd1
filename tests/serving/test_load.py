"""Many streams at once, clients that go away, and clients that hardly read.

The long test runs for two minutes (`make test-all`); the others are the same with less.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs jackfield[client]")

from served import Served

from jackfield.client.address import Address
from jackfield.client.load import Arrivals, Outcome, run
from jackfield.client.prompts import Beginnings
from jackfield.client.wire import Wires

Serve = Callable[..., Served]
NEW = 16
PROMPTS = Beginnings(0)
DIFFERENT = 12  # prompts


def body(number: int, new: int = NEW) -> bytes:
    asked = {"model": "demo", "prompt": PROMPTS(number % DIFFERENT), "max_tokens": new}
    options = {"stream_options": {"include_usage": True}, "temperature": 0, "stream": True}
    return json.dumps(asked | options).encode()


def right(served: Served) -> dict[str, str]:
    """Each prompt's text when nobody else is there."""
    texts = [PROMPTS(number) for number in range(DIFFERENT)]
    done = [served.engine.generate([text], max_new_tokens=NEW, do_sample=False) for text in texts]
    return {text: one[0].text or "" for text, one in zip(texts, done, strict=True)}


def loaded(served: Served, clients: int, requests: int | None, seconds: float | None) -> Outcome:
    async def act() -> Outcome:
        with closing(Wires(Address.of(served.url), "/completions", 300)) as wires:
            return await run(wires, Arrivals(clients, None, requests, seconds), body)

    return asyncio.run(act())


def assert_all_right(outcome: Outcome, texts: dict[str, str]) -> None:
    assert [one.error for one in outcome.timed if one.error] == []
    wrong = [one for one in outcome.timed if one.text not in texts.values()]
    assert wrong == []


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def at_rest(served: Served) -> dict[str, Any]:
    """What is held when nobody asks: waited for, since a step may be going on."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        seen = served.engine.statistics()
        (model,) = served.pool.models.values()
        busy = seen.running + seen.waiting + model.in_use
        tasks = sorted(repr(task.get_coro()) for task in asyncio.all_tasks(served.loop))
        if not busy and not any("run_asgi" in task for task in tasks):
            break
        time.sleep(0.02)
    assert seen.cache is not None
    threads = sorted(t.name for t in threading.enumerate() if t.name != "jackfield")
    return {"busy": busy, "tasks": len(tasks), "pages": seen.cache.pages_used, "threads": threads}


def test_each_of_many_streams_is_its_own(serve: Serve) -> None:
    served = serve(max_waiting=300)
    texts = right(served)
    order: list[tuple[str, str]] = []

    async def act() -> None:
        with closing(Wires(Address.of(served.url), "/completions", 300)) as wires:

            async def one(number: int) -> None:
                outcome = await run(wires, Arrivals(1, None, 1, None), lambda _: body(number))
                order.append((PROMPTS(number % DIFFERENT), outcome.timed[0].text))

            await asyncio.gather(*(one(number) for number in range(64)))

    asyncio.run(act())
    assert len(order) == 64
    assert [pair for pair in order if texts[pair[0]] != pair[1]] == []


@pytest.mark.long
def test_200_streams_for_two_minutes_lose_nothing_and_keep_nothing(serve: Serve) -> None:
    served = serve(max_waiting=300)
    texts = right(served)
    loaded(served, 200, None, 20.0)
    before, rest = resident(), at_rest(served)
    outcome = loaded(served, 200, None, 120.0)
    assert_all_right(outcome, texts)
    assert len(outcome.timed) > 200
    assert at_rest(served)["pages"] == rest["pages"]
    kept = sum(len(one.came) * 8 + 500 for one in outcome.timed)  # of the client, in this process
    assert resident() - before < 20_000_000 + 2 * kept


def drop(served: Served, number: int, chance: random.Random) -> None:
    """Ask for a long text and go away: before it is read, while it waits, or in the middle."""
    host, port = served.url.removeprefix("http://").split(":")
    asked = body(number, 200)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as made:
        made.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        when = chance.choice(("at once", "soon", "reading"))
        if when == "soon":
            time.sleep(chance.uniform(0, 0.3))
        if when == "reading":
            made.recv(chance.randrange(1, 3000))


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
def test_clients_that_go_away_leave_nothing_and_change_nothing(serve: Serve, count: int) -> None:
    served = serve(max_waiting=1000)
    texts = right(served)
    loaded(served, 8, 16, None)  # all threads that there will be
    rest = at_rest(served)
    chance = random.Random(0)
    leavers = [
        threading.Thread(target=drop, args=(served, n, random.Random(chance.random())))
        for n in range(count)
    ]
    for one in leavers:
        one.start()
    outcome = loaded(served, 8, 24, None)
    for one in leavers:
        one.join()
    assert_all_right(outcome, texts)
    assert {**at_rest(served), "threads": ()} == {**rest, "threads": ()}
    assert set(at_rest(served)["threads"]) <= {*rest["threads"], *_readers()}
    made = served.engine.statistics().finished
    assert made["cancelled"] >= count / 2, made


def _readers() -> set[str]:
    return {f"jackfield-read_{n}" for n in range(4)}


def test_who_reads_a_byte_a_second_harms_nobody(serve: Serve) -> None:
    """A slow reader's connection is full after a while; the others do not wait for it."""
    served = serve(max_waiting=300)
    texts = right(served)
    host, port = served.url.removeprefix("http://").split(":")
    slow: list[socket.socket] = []
    for number in range(12):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        made.connect((host, int(port)))
        asked = json.dumps({
            "model": "demo", "prompt": PROMPTS(number), "max_tokens": 200, "stream": True, "n": 4,
            "logprobs": 5, "temperature": 1, "seed": number, "logit_bias": {"0": -100},
        }).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head = head.replace("Host: x", f"Host: {host}")
        made.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        made.recv(1)
        slow.append(made)
    outcome = loaded(served, 8, 24, None)
    assert_all_right(outcome, texts)
    for made in slow:
        assert made.recv(1)
        made.close()
    assert at_rest(served)["busy"] == 0
