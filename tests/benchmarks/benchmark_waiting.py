"""What a crowd costs: `python` runs it and prints. Requests that wait, deadlines, pages of a pool.

A step of the demo model lets in one request, which feeds its prompt and ends; so many more wait.
Told is the median over steps of the processor time beside the forward call, and the part of it that
goes to who enters and whose deadline has passed. Nothing is computed where pages are counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import jackfield
from jackfield.contracts import Sequence, Settings
from jackfield.engine.sequences import RunningSequence
from jackfield_plugins.cache.paged.pages import PageAllocator
from jackfield_plugins.cache.paged.store import PagedKVCache

CROWDS = (0, 1_000, 100_000)
STEPS = 60
PROMPT = [5, 6, 7]
PAGES = 1_000_000
PAGE_SIZE = 16


def say(what: str, figure: str) -> None:
    sys.stdout.write(f"{what:62} {figure}\n")
    sys.stdout.flush()


def took(act: Callable[[], Any]) -> float:
    """Seconds of processor time of the thread that calls."""
    began = time.thread_time()
    act()
    return time.thread_time() - began


class Parts:
    """Adds up the time that some methods of an object take."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return act(*given)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def crowd(count: int, deadline: float | None) -> None:
    """Steps with so many who wait."""
    with jackfield.load("demo", max_batch_size=1, cache_implementation="paged") as engine:
        loop: Any = engine._loop
        asked = {"max_new_tokens": 1, "deadline": deadline}
        settings = engine._intake.sequence(PROMPT, asked, streams=False).settings
        for number in range(count + STEPS + 10):
            loop.submit(RunningSequence(10 + number, PROMPT, settings))
        if count == 0:
            waiting = list(loop.waiting)
            for sequence in waiting:
                loop.cancel(sequence)
        forward, entering = Parts(loop, "forward"), Parts(loop, "_expire", "_admit")
        beside, parts = [], []
        for step in range(STEPS + 5):
            if count == 0:
                loop.submit(RunningSequence(10**6 + step, PROMPT, settings))
            forward.seconds = entering.seconds = 0.0
            whole = took(loop.step)
            beside.append(1000 * (whole - forward.seconds))
            parts.append(1000 * entering.seconds)
        middle, part = statistics.median(beside[5:]), statistics.median(parts[5:])
        with_deadlines = "" if deadline is None else ", each with a deadline"
        say(
            f"a step that lets one in, {count:,} wait{with_deadlines}",
            f"{middle:.2f} ms beside the forward call, {part:.3f} for entering",
        )
        if not count:
            return
        waiting = list(loop.waiting)[:: max(1, len(loop.waiting) // 500)]
        each = took(lambda: [loop.cancel(sequence) for sequence in waiting]) / len(waiting)
        say(f"cancelling one of {count:,} that wait{with_deadlines}", f"{1e6 * each:.0f} us")
        loop.reset()


def pages() -> None:
    """A pool of a million pages: all kept, then 16 freed; and 512 requests that enter one."""
    allocator, last = PageAllocator(PAGES), None
    held = []
    for number in range(PAGES):
        last = allocator.take(last)
        allocator.publish(last, number.to_bytes(8, "little"))
        held.append(last)
    allocator.release(held)
    freed = took(lambda: allocator.forget(16))
    say(f"freeing 16 of {PAGES:,} kept pages", f"{1e6 * freed:.0f} us")
    settings = Settings(max_new_tokens=8)
    for rounds in range(2):  # the first one reads modules
        size = PAGES * PAGE_SIZE
        store = PagedKVCache([None], PAGE_SIZE, size, torch.device("cpu"), prefix_sharing=True)
        come = [Sequence(n, [n % 50] * 64, settings) for n in range(512)]
        entering = took(lambda store=store, come=come: [store.admit(s) for s in come])
        if rounds:
            say(f"512 that enter a pool of {PAGES:,} pages", f"{1000 * entering:.1f} ms")


def main() -> None:
    torch.set_num_threads(1)
    for deadline in (None, 1e6):
        for count in CROWDS:
            crowd(count, deadline)
    pages()


if __name__ == "__main__":
    main()
