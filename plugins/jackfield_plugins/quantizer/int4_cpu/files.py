"""Checkpoint files: what they hold, and the memory that they take once they were read."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open

from jackfield_plugins.quantizer.int4_cpu.linear import WEIGHTS

_MADV_PAGEOUT = 21  # Linux 5.4: give pages back; unlike DONTNEED, none that was written to is lost
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\.safetensors$", re.MULTILINE)


def flaws(files: Sequence[str], group_size: int) -> list[str]:
    """What does not fit in quantized weights, by their shapes; reads no weight."""
    shapes: dict[str, dict[str, list[int]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                path, _, own = key.rpartition(".")
                if own in WEIGHTS:
                    shapes.setdefault(path, {})[own] = tensors.get_slice(key).get_shape()
    found = []
    for path, parts in shapes.items():
        if missing := set(WEIGHTS) - set(parts):
            found.append(f"{path} has no {missing.pop()}")
        elif parts["scales"][1] * group_size != parts["qweight"][1] * 2:
            groups = parts["qweight"][1] * 2 // parts["scales"][1]
            found.append(f"{path} has groups of {groups}, and its config says {group_size}")
    return found


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
