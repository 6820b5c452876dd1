"""Whether memory grows with what is done again and again."""

from __future__ import annotations

import contextlib
import gc
import math
import tracemalloc
from collections.abc import Callable, Iterator

CALLS = 15
WINDOW = 5


def growth(act: Callable[[], None], most: float) -> float:
    """Bytes of Python's memory that stay from each call of `act`, once it has been warmed up.

    The least mean of `WINDOW` calls, of up to `CALLS`, which end when one is no more than `most`:
    what is kept in blocks counts where every window has a block. What is filled once does not, such
    as a table that doubles, and objects that Python keeps for the next: it leaves the window.
    """
    traced = tracemalloc.is_tracing()
    act()
    with quick_collection():
        if not traced:
            tracemalloc.start()
        try:
            act()
            held, least = [_held()], math.inf
            for _ in range(CALLS):
                act()
                held.append(_held())
                if len(held) > WINDOW:
                    least = min(least, (held[-1] - held[-1 - WINDOW]) / WINDOW)
                if least <= most:
                    break
        finally:
            if not traced:
                tracemalloc.stop()
    return least


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """While it is open, the collector does not look at what there was before: torch is large.

    What the process itself has frozen stays so, and then nothing more is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
