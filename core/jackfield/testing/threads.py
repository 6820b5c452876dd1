"""Calls with other numbers of threads, and from several threads at once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from jackfield.testing.checks import WrongError

#: Threads that a kernel may split its work over: one, a power of two, and an odd number.
COUNTS = (1, 2, 3)
_TIMES, _LIMIT = 40, 60.0
_SWITCH = 1e-5  # seconds after which Python lets another thread go on


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


def in_threads(acts: Sequence[Callable[[], object]], what: str, limit: float) -> None:
    """Run each in a thread of its own, all at once. Raises what the first of them raised, and
    WrongError where `what` does not end within `limit` seconds.
    """
    errors: list[BaseException] = []
    ready = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> None:
        try:
            ready.wait()
            act()
        except BaseException as error:  # noqa: BLE001 - it is raised where the threads are awaited
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    with _switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
    if any(thread.is_alive() for thread in threads):
        raise WrongError(f"{what} do not end within {limit:g} s")
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def are_alone(calls: Sequence[Callable[[], torch.Tensor]]) -> bool:
    """Run each many times in a thread of its own, all at once, as engines in threads do.

    Whether each returns what it does by itself, but for sums in another order.
    """
    with torch.inference_mode():
        alone = [call().clone() for call in calls]
    wrong: list[int] = []

    def run(at: int) -> None:
        for _ in range(_TIMES):
            if wrong:
                return
            with torch.inference_mode():
                if not _alike(calls[at](), alone[at]):
                    wrong.append(at)

    acts = [partial(run, at) for at in range(len(calls))]
    in_threads(acts, "calls of two threads at once", _LIMIT)
    return not wrong


def _alike(found: torch.Tensor, alone: torch.Tensor) -> bool:
    if torch.equal(found, alone):
        return True
    bound = 16 * torch.finfo(alone.dtype).eps * float(alone.abs().max())
    return float((found.double() - alone.double()).abs().max()) <= bound
