"""How many threads a step computes with, and that there are no more of them than processors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: threads are given back, settings are kept
_FORKED = 0x40  # PF_FORKNOEXEC among the kernel's flags of a process


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
    if (pause := _pause()) is not None:
        pause(_SOFT)


if hasattr(os, "register_at_fork"):
    # In the child they are not there, and whatever waits for them waits for ever.
    os.register_at_fork(before=give_back_threads)


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the OpenMP that torch computes with, where that is GNU's.

    None as well in a process that was forked before this file was imported.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        torch_cpu = ctypes.CDLL(str(library))  # is loaded; the search goes through what it needs
        pause: Callable[[int], int] = torch_cpu.omp_pause_resource_all
        flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6])
    except (OSError, AttributeError):  # another system, or an OpenMP before 5.0
        return None
    others = hasattr(torch_cpu, "__kmpc_fork_call")  # LLVM's and Intel's
    return None if others or flags & _FORKED else pause
