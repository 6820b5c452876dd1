"""Whether memory grows with what is done again and again."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator


def growth(act: Callable[[], None]) -> float:
    """Bytes of Python's memory that stay from each call of `act`, once it has been warmed up.

    The least of three calls: what is filled once, such as a table that doubles, does not count.
    """
    traced = tracemalloc.is_tracing()
    act()
    with quick_collection():
        if not traced:
            tracemalloc.start()
        try:
            act()
            kept = [_held()]
            for _ in range(3):
                act()
                kept.append(_held())
        finally:
            if not traced:
                tracemalloc.stop()
    return min(now - before for before, now in itertools.pairwise(kept))


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
