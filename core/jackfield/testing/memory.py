"""Whether memory grows with what is done again and again, and which tensors are new."""

from __future__ import annotations

import contextlib
import gc
import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_OF_PYTHON = 5000  # Python 3.12 counts some hundreds that nobody has frozen
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
    if gc.get_freeze_count() > _OF_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def new_tensors() -> Iterator[Callable[[], list[torch.Tensor]]]:
    """A function that finds all tensors which have memory that was not there before.

    What shares memory with one that was there is not new, unless that one was frozen (`gc.freeze`).
    """
    gc.collect()
    known = _tensors()  # held, so that nothing new lies where one of them was
    places = {_place(tensor) for tensor in known}
    with quick_collection():

        def new() -> list[torch.Tensor]:
            gc.collect()
            return [tensor for tensor in _tensors() if _place(tensor) not in places]

        yield new


def _tensors() -> list[torch.Tensor]:
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    found = [t for t in gc.get_objects() if type(t) in kinds]
    return [t for t in found if t.layout is torch.strided and t.device.type != "meta"]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
