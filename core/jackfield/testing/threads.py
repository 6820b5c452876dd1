"""Calls with other numbers of threads, and from several threads at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

#: Threads that a kernel may split its work over: one, a power of two, and an odd number.
COUNTS = (1, 2, 3)
_TIMES = 40


def on(count: int) -> str:
    """How many, in words."""
    return f"on {count} threads" if count > 1 else "on one thread"


@contextlib.contextmanager
def of_torch(count: int) -> Iterator[None]:
    """Let torch have `count` threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def at_once(calls: Sequence[Callable[[], torch.Tensor]]) -> int | None:
    """Run each many times in a thread of its own, all together, as engines in threads do.

    Which of them then returned something else than by itself, by more than sums in another order
    are; None: none did. Raises what a call raises.
    """
    with torch.inference_mode():
        alone = [call().clone() for call in calls]
    begin, stop = threading.Barrier(len(calls)), threading.Event()
    wrong: list[int] = []
    raised: list[BaseException] = []

    def run(at: int) -> None:
        begin.wait()
        try:
            for _ in range(_TIMES):
                with torch.inference_mode():
                    found = calls[at]()
                if stop.is_set():
                    return
                if not _alike(found, alone[at]):
                    wrong.append(at)
                    stop.set()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the check
            raised.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error
    return wrong[0] if wrong else None


def _alike(found: torch.Tensor, alone: torch.Tensor) -> bool:
    if torch.equal(found, alone):
        return True
    bound = 16 * torch.finfo(alone.dtype).eps * float(alone.abs().max())
    return float((found.double() - alone.double()).abs().max()) <= bound
