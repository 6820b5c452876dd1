"""Memory of packed weights, in large pages.

One token reads all of them, and where a page has 4 KiB, looking up pages is part of the time: large
ones took 3 to 9 % off on a virtual machine, where a lookup goes through two tables.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch

_CHUNK = 1 << 25  # bytes: the weights of several layers share pages
_LARGE = 1 << 21  # of a page
_LEAST = 1 << 16  # what is smaller lies anywhere
_LINE = 64
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it

_lock = threading.Lock()
#: The chunk that has room yet, while a tensor keeps it.
_newest: weakref.ref[mmap.mmap] | None = None
_used = 0


def zeros(num_bytes: int) -> torch.Tensor:
    """So many zeros, uint8, on the CPU; in large pages where they are many and the system has such.

    A chunk of memory lives as long as a tensor that has a part of it; none of these can be resized.
    """
    made = _in_large_pages(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu") if made is None else made


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in such memory; the tensor itself where it is small, on another device, or there is
    no such memory.
    """
    if tensor.device.type != "cpu":
        return tensor
    made = _in_large_pages(tensor.nbytes)
    return tensor if made is None else made.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _in_large_pages(num_bytes: int) -> torch.Tensor | None:
    if num_bytes < _LEAST or _ADVICE is None:
        return None
    if num_bytes > _CHUNK // 2:
        return _part(_mapped(num_bytes), 0, num_bytes)
    global _newest, _used
    with _lock:
        chunk = None if _newest is None else _newest()
        if chunk is None or _used + num_bytes > _CHUNK:
            chunk, _used = _mapped(_CHUNK), 0
            _newest = None if chunk is None else weakref.ref(chunk)
        offset, _used = _used, _used + -(-num_bytes // _LINE) * _LINE
    return _part(chunk, offset, num_bytes)


def _part(chunk: mmap.mmap | None, offset: int, num_bytes: int) -> torch.Tensor | None:
    """Counted from where a page begins: a chunk has one more than it needs."""
    if chunk is None:
        return None
    address = torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr()
    offset += -address % _LARGE
    return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=offset)


def _mapped(num_bytes: int) -> mmap.mmap | None:
    assert _ADVICE is not None
    try:
        whole = (-(-num_bytes // _LARGE) + 1) * _LARGE
        chunk = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(_ADVICE)
    except (OSError, ValueError):  # no such room, or a system that is built without such pages
        return None
    return chunk
