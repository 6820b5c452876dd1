"""The memory that checkpoint files take once they were read."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

_MADV_PAGEOUT = 21  # Linux 5.4: give pages back; unlike DONTNEED, none that was written to is lost
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\.safetensors$", re.MULTILINE)


def forget_files() -> None:
    """Give back the pages of every checkpoint file of this process; reading one brings it back.

    Weights that were read are views into such files, which stay resident.
    Does nothing where the system knows no such call.
    """
    advise, maps = _madvise(), Path("/proc/self/maps")
    if advise is None or not maps.is_file():
        return
    for start, end in _MAPPING.findall(maps.read_text()):
        first = int(start, 16)
        advise(first, int(end, 16) - first, _MADV_PAGEOUT)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
