"""How fast a device reads its memory, and multiplies: a short streaming read, a short product."""

from __future__ import annotations

import time

import torch

from jackfield.devices import free_bytes
from jackfield.errors import UsageError

_WANTED = 1 << 30  # bytes: far more than any cache holds
_SECONDS = 1.0
_ROW = 4096  # numbers of a matrix' row
_SIDE = 2048  # of a product's matrices: enough to keep all of a device busy


def measure_bandwidth(device: str) -> float:
    """Bytes a second of the fastest of several reads of one buffer, with all of torch's threads.

    The buffer is summed, from one end to the other, or multiplied as a matrix, several rows side by
    side: some processors read it so a quarter faster. Takes about a second, and up to 1 GiB. Raises
    UsageError where not even 64 MiB are free.
    """
    free = free_bytes(device)
    size = min(_WANTED, _WANTED if free is None else free // 4)
    if size < 1 << 26:
        raise UsageError(
            f"too little memory is free on {device} to measure its bandwidth; give it, such as "
            "80GB/s"
        )
    numbers = torch.ones(size // 4 // _ROW, _ROW, dtype=torch.float32, device=device)
    row = torch.ones(_ROW, dtype=torch.float32, device=device)
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends or best == float("inf"):
        for side_by_side in (False, True):
            started = time.perf_counter()
            found = (numbers @ row)[0] if side_by_side else numbers.sum()
            found.item()  # waits for the device
            best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


def measure_flops(device: str, dtype: str) -> float:
    """Multiplications and additions a second of the fastest of several products of two matrices.

    `dtype` is the name of their numbers'. With all of torch's threads; takes about a second.
    """
    a, b = (torch.ones(_SIDE, _SIDE, dtype=getattr(torch, dtype), device=device) for _ in range(2))
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends or best == float("inf"):
        started = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * _SIDE**3 / best
