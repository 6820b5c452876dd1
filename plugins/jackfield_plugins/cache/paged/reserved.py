"""Memory of pools that grow in place: addresses are reserved, memory comes when it is written.

A pool that grew by a copy of itself would hold up a step for 0.1 s a hundred megabytes, and need
both for a while.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch

_NORESERVE = 0x4000  # Linux: counts nothing against what may be promised; Python 3.13 has the name
_NEVER = "2"  # of `overcommit_memory`: what is reserved counts as used


class Reserved:
    """Zeros at fixed addresses, of which tensors of any length up to `num_bytes` are made.

    In pages of the usual size: to find room for huge ones held up a step for 0.3 s.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory: mmap.mmap | None = mmap.mmap(-1, num_bytes, flags=flags)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The first places as a tensor, which keeps the memory.

        None: there are not so many, and they are let go of, with what was written there.
        """
        count = torch.Size(shape).numel()
        if self._memory is None or count * dtype.itemsize > len(self._memory):
            self._memory = None
            return None
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


def reserved(num_bytes: int, device: torch.device) -> Reserved | None:
    """Addresses for so many bytes; None where none are wanted, or this system has none to give."""
    if not num_bytes or device.type != "cpu" or sys.platform != "linux" or _counts():
        return None
    try:
        return Reserved(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    except (OSError, ValueError):  # a limit on addresses
        return None


def _counts() -> bool:
    """Whether what is reserved counts as used: by a limit of this process, or by the system."""
    import resource  # there is none on Windows

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == _NEVER
    except OSError:
        return True
