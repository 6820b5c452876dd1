"""Load on a server: so many requests at a time, or so many a second, whatever is still open.

With a fixed number of clients a slow server is asked less often, which flatters it; arrivals that
wait for nothing show the queue that forms (Schroeder, Wierman and Harchol-Balter, "Open versus
closed: a cautionary tale", NSDI 2006). Their times count from when a request was due.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from jackfield.client.timing import Timed
from jackfield.client.wire import CutOffError, Wires


@dataclass(frozen=True)
class Arrivals:
    """When requests come: with `concurrency`, each as another one ends; else `rate` a second, at
    random (a Poisson process with the seed).

    They end after `requests` of them, or with the last one that was due within `duration` seconds.
    """

    concurrency: int | None
    rate: float | None
    requests: int | None
    duration: float | None
    seed: int = 0


@dataclass
class Outcome:
    """What came of a load: `seconds` from the first request to the end of the last, and how much
    processor time the client took in it.
    """

    arrivals: Arrivals
    timed: list[Timed]
    seconds: float
    client_seconds: float


async def run(wires: Wires, arrivals: Arrivals, body: Callable[[int], bytes]) -> Outcome:
    """Put the load on a server; `body` makes that of each request."""
    began, processor = time.perf_counter(), time.process_time()
    timed: list[Timed] = []

    async def one(number: int, due: float) -> None:
        timed.append(found := Timed(due))
        await _ask(wires, body(number), found)

    if arrivals.concurrency is not None:
        numbers = _while_wanted(arrivals, began)

        async def client() -> None:
            for number in numbers:
                await one(number, time.perf_counter())

        await asyncio.gather(*(client() for _ in range(arrivals.concurrency)))
    else:
        async with asyncio.TaskGroup() as open_:
            async for number, due in _poisson(arrivals, began):
                open_.create_task(one(number, due))
    return Outcome(arrivals, timed, time.perf_counter() - began, time.process_time() - processor)


def _while_wanted(arrivals: Arrivals, began: float) -> Iterator[int]:
    for number in itertools.count():
        if number == arrivals.requests:
            return
        if arrivals.duration is not None and time.perf_counter() - began >= arrivals.duration:
            return
        yield number


async def _poisson(arrivals: Arrivals, began: float) -> AsyncIterator[tuple[int, float]]:
    chance, due = random.Random(arrivals.seed), began
    assert arrivals.rate is not None
    for number in itertools.count():
        if number == arrivals.requests:
            return
        due += chance.expovariate(arrivals.rate) if number else 0.0
        if arrivals.duration is not None and due - began >= arrivals.duration:
            return
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield number, due


async def _ask(wires: Wires, body: bytes, timed: Timed) -> None:
    timed.sent = time.perf_counter()
    try:
        reply = await wires.post(body)
    except CutOffError:
        timed.error = "cut off"
    except TimeoutError:
        timed.error = "timeout"
    except ConnectionRefusedError:
        timed.error = "refused connection"
    except OSError as error:
        timed.error = type(error).__name__
    else:
        timed.read(reply)
    # the end is that of the last byte: what this client does after it is nobody's time
    timed.ended = reply.pieces[-1][0] if timed.error is None else time.perf_counter()
