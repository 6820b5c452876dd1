"""What a token costs on its way from the engine to the socket.

    python tests/benchmarks/cost_of_serving.py [--clients 1,8,32] [--rounds 3]
        [--interval SECONDS] [--profile FILE]

The small model inside the package makes stories of 64 tokens for so many clients at a time: in this
process (`stream`: coroutines that read `astream`; `submit`: nobody reads along), and over HTTP,
where `jackfield bench serve` is a process of its own. The rounds alternate. Prints tokens a second,
the ratio to each of the two, and processor time a token of the thread of the event loop and of the
engine's, which other programs disturb less than tokens a second. `--profile` writes what cProfile
finds in the thread of the event loop during the last round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jackfield.client.prompts import Beginnings

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from served import Served, serving

NEW = 64


@dataclass
class Cost:
    """Of one run: tokens, seconds, and seconds of processor time by thread."""

    tokens: int
    seconds: float
    threads: dict[str, float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def per_token(self, thread: str) -> float:
        return 1e6 * self.threads.get(thread, 0.0) / self.tokens


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Processor time of this process's threads, looked at often, since an idle engine's ends."""
    found: dict[str, float] = {}
    last: dict[threading.Thread, float] = {}
    ended = threading.Event()

    def look(first: bool = False) -> None:
        for thread in threading.enumerate():
            with contextlib.suppress(OSError, TypeError):
                clock = time.pthread_getcpuclockid(thread.ident or 0)
                now = time.clock_gettime(clock)
                before = last.get(thread, now if first else 0.0)
                found[thread.name] = found.get(thread.name, 0.0) + now - before
                last[thread] = now

    def watch() -> None:
        while not ended.wait(0.02):
            look()

    look(first=True)
    watcher = threading.Thread(target=watch, name="watch")
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
        look()


def in_process(served: Served, clients: int, requests: int, first: int, *, stream: bool) -> Cost:
    """Closed loop of coroutines in this thread."""
    prompts = Beginnings(0)
    numbers = iter(range(first, first + requests))
    made = 0

    async def client() -> None:
        nonlocal made
        settings = {"max_new_tokens": NEW, "temperature": 0}
        for number in numbers:
            if stream:
                async for delta in served.engine.astream(prompts(number), **settings):
                    made += len(delta.token_ids)
            else:
                completion = await served.engine.submit(prompts(number), **settings)
                made += len(completion.token_ids)

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    with watched() as threads:
        asyncio.run(all_of_them())
    return Cost(made, time.perf_counter() - began, threads)


def over_http(served: Served, clients: int, requests: int, seed: int) -> Cost:
    words = (
        f"bench serve --url {served.url} --model demo --endpoint completions --warm-up 0 --json "
        f"--concurrency {clients} --requests {requests} --max-tokens {NEW} --seed {seed}"
    )
    command = [sys.executable, "-m", "jackfield", *words.split()]
    with watched() as threads:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (load,) = json.loads(done.stdout)["loads"]
    assert load["failed"] == 0, load["errors"]
    return Cost(load["tokens"], load["seconds"], threads)


def compare(served: Served, clients: int, rounds: int, profile: Path | None) -> None:
    requests = max(32, 4 * clients)
    ways: dict[str, Callable[[int], Cost]] = {
        "submit": lambda n: in_process(served, clients, requests, n * 10**6, stream=False),
        "stream": lambda n: in_process(served, clients, requests, n * 10**6 + 10**5, stream=True),
        "http": lambda n: over_http(served, clients, requests, n),
    }
    ways["http"](1000)  # warms up
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    for n in range(1, rounds + 1):
        for name, way in ways.items():
            found[name].append(way(n))
    rates = {name: statistics.median(c.rate for c in costs) for name, costs in found.items()}
    print(f"{clients} clients: " + ", ".join(f"{k} {v:.0f} tokens/s" for k, v in rates.items()))
    for other in ("submit", "stream"):
        pairs = zip(found["http"], found[other], strict=True)
        ratio = statistics.median(mine.rate / theirs.rate for mine, theirs in pairs)
        print(f"  http / {other}: {ratio:.3f}")
    for name, loop in (("submit", "MainThread"), ("stream", "MainThread"), ("http", "server")):
        spent = {
            what: statistics.median(cost.per_token(thread) for cost in found[name])
            for what, thread in (("event loop", loop), ("engine", "jackfield"))
        }
        print(f"  {name:6}: us a token: " + ", ".join(f"{k} {v:.0f}" for k, v in spent.items()))
    if profile is not None:
        profiled(served, lambda: over_http(served, clients, requests, 99), profile)


def profiled(served: Served, act: Callable[[], object], file: Path) -> None:
    """Profile the thread of the event loop while `act` runs."""
    loop = served.loop
    profile = cProfile.Profile()
    loop.call_soon_threadsafe(profile.enable)
    act()
    ended = threading.Event()
    loop.call_soon_threadsafe(lambda: (profile.disable(), ended.set()))
    ended.wait()
    profile.dump_stats(file)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--clients", default="1,8,32")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--profile", type=Path)
    asked.add_argument("--interval", type=float, default=0.02, help="the server's stream_interval")
    given = asked.parse_args()
    with serving(stream_interval=given.interval) as served:
        for clients in map(int, given.clients.split(",")):
            compare(served, clients, given.rounds, given.profile)
