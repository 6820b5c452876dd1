"""Minutes of mixed load on one engine: memory stays flat, every request ends, all counts agree."""

from __future__ import annotations

import collections
import gc
import os
import random
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import jackfield
from jackfield.demo.tasks import TASKS, heldout

SECONDS = float(os.environ.get("JACKFIELD_SOAK_SECONDS", "120"))
CLIENTS = 6
GROWTH = 8.0  # MB between a third of the time and its end; noise of the allocator is about 2

STATM = Path("/proc/self/statm")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.0, "seed": 5, "top_k": 20, "priority": 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"stop": ["5", "e"], "logprobs": 2},
    {"deadline": 0.3, "priority": -1},
    {"cache_salt": "mine", "min_p": 0.1},
]


def resident() -> float:
    """Megabytes of this process in memory."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Client:
    """Asks one thing after another until told to stop, and counts how they ended."""

    def __init__(self, engine: jackfield.Engine, number: int, texts: list[str]) -> None:
        self.engine, self.texts = engine, texts
        self.draw = random.Random(number)
        self.ended: collections.Counter[str] = collections.Counter()
        self.tokens_in = self.tokens_out = 0
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                for completion in self.ask():
                    self.ended[completion.finish_reason] += 1
                    self.tokens_in += completion.usage.prompt_tokens
                    self.tokens_out += len(completion.token_ids)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error

    def ask(self) -> list[jackfield.Completion]:
        prompt = [{"role": "user", "content": self.draw.choice(self.texts)}]
        settings = dict(self.draw.choice(SETTINGS), max_new_tokens=self.draw.randint(1, 64))
        way = self.draw.random()
        if way < 0.2:
            return self.engine.generate(
                prompt, temperature=1.0, num_return_sequences=3, max_new_tokens=16
            )
        request = self.engine.submit(prompt, **settings)
        if way < 0.4:
            for delta in request:
                if delta.completion is None and self.draw.random() < 0.2:
                    request.cancel()
        elif way < 0.5:
            request.cancel()
        return [request.result(120)]


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(not STATM.exists(), reason="reads memory from /proc")
def test_minutes_of_mixed_load_leave_nothing_behind() -> None:
    texts = [item.prompt for task in TASKS for item in heldout(task, 40, seed=2)]
    with jackfield.load(
        "demo",
        cache_implementation="paged?page_size=4&num_tokens=320&swap=True",
        prefill_chunk_size=16,
        max_batch_size=8,
    ) as engine:
        clients = [Client(engine, number, texts) for number in range(CLIENTS)]
        before = threading.active_count()
        for client in clients:
            client.thread.start()
        memory = []
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            time.sleep(SECONDS / 60)
            memory.append(resident())
            assert [c.failure for c in clients] == [None] * CLIENTS
        for client in clients:
            client.stop.set()
        for client in clients:
            client.thread.join(120)
        worker = engine._worker
        with worker._changed:
            assert worker._changed.wait_for(lambda: worker._thread is None, 60)
        figures = engine.statistics()
        assert threading.active_count() <= before
    ended = sum((c.ended for c in clients), collections.Counter())
    third = len(memory) // 3
    warm, last = median(memory[third : third + 5]), median(memory[-5:])
    print(  # noqa: T201 - the figures are what this is for
        f"{SECONDS:g} s, {figures}; ended {dict(ended)}; memory {memory[0]:.1f} MB, "
        f"{warm:.1f} after a third, {last:.1f} at the end"
    )
    assert [c.failure for c in clients] == [None] * CLIENTS
    assert figures.finished == ended
    assert figures.tokens_in == sum(c.tokens_in for c in clients)
    assert figures.tokens_out == sum(c.tokens_out for c in clients)
    assert (figures.running, figures.waiting) == (0, 0)
    assert figures.cache is not None
    assert (figures.cache.pages_used, figures.cache.swapped) == (0, 0)
    assert figures.preemptions > 0
    assert figures.cache.prefix_tokens > 0
    assert last - warm < GROWTH
