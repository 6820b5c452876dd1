"""Memory of packed weights, in large pages.

One token reads all of them, and where a page has 4 KiB, looking up pages is part of the time: large
ones took 3 to 9 % off on a virtual machine, where a lookup goes through two tables.
"""

from __future__ import annotations

import mmap
import threading

import torch

_CHUNK = 1 << 25  # bytes: the weights of several layers share pages
_LARGE = 1 << 21  # of a page
_LEAST = 1 << 16  # what is smaller lies anywhere
_LINE = 64
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it

_lock = threading.Lock()
_chunk: mmap.mmap | None = None
_used = 0


def zeros(num_bytes: int) -> torch.Tensor:
    """So many zeros, uint8; in large pages where they are many and this system has such pages.

    A chunk of memory lives as long as one of its tensors.
    """
    if num_bytes < _LEAST or _ADVICE is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    chunk, offset = _place(num_bytes)
    if chunk is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=offset)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in such memory; of another device, and without values, the tensor itself."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST:
        return tensor
    made = zeros(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return made.copy_(tensor)


def _place(num_bytes: int) -> tuple[mmap.mmap | None, int]:
    global _chunk, _used
    if num_bytes > _CHUNK // 2:
        return _mapped(num_bytes), 0
    with _lock:
        if _chunk is None or len(_chunk) - _used < num_bytes:
            _chunk, _used = _mapped(_CHUNK), 0
        offset = _used
        _used += -(-num_bytes // _LINE) * _LINE
        return _chunk, offset


def _mapped(num_bytes: int) -> mmap.mmap | None:
    assert _ADVICE is not None
    try:
        whole = -(-num_bytes // _LARGE) * _LARGE
        chunk = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(_ADVICE)
    except (OSError, ValueError):  # no such room, or a system that is built without such pages
        return None
    return chunk
