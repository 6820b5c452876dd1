"""How many threads a step computes with, and that there are no more of them than processors."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

#: The thread that a forked process began with: those that waited for it are not there, and to end
#: them would wait for them for ever.
_forked: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.add(threading.get_ident()))

_SOFT = 1  # omp_pause_soft: threads are given back, settings are kept


def compute_with(threads: int) -> None:
    """As many threads as the caller's has, which a thread that runs already would not hear of."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def give_back_threads() -> None:
    """End the OpenMP threads that wait for the thread which calls this; its next operation makes
    new ones (0.3 ms).

    GNU's OpenMP gives every thread that computes a team of its own. Where the teams together have
    more threads than there are processors it has them sleep at each barrier instead of spinning,
    also those that could run; so the team of the thread that loaded a model and waits for its
    text would slow down the one of the engine's (gomp_managed_threads in libgomp's
    config/linux/wait.h). Other OpenMP libraries have one team for all.
    """
    if threading.get_ident() not in _forked and (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the OpenMP that torch computes with, where that is GNU's."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        torch_cpu = ctypes.CDLL(str(library))  # is loaded; the search goes through what it needs
        pause: Callable[[int], int] = torch_cpu.omp_pause_resource_all
    except (OSError, AttributeError):  # another system, or an OpenMP before 5.0
        return None
    return None if hasattr(torch_cpu, "__kmpc_fork_call") else pause  # LLVM's and Intel's
