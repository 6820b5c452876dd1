"""How fast a device reads its memory: a short streaming read."""

from __future__ import annotations

import time

import torch

from jackfield.devices import free_bytes
from jackfield.errors import UsageError

_WANTED = 1 << 30  # bytes: far more than any cache holds
_SECONDS = 1.0


def measure_bandwidth(device: str) -> float:
    """Bytes a second of the fastest of several reads of one buffer, with all of torch's threads.

    Takes about a second, and up to 1 GiB. Raises UsageError where not even 64 MiB are free.
    """
    free = free_bytes(device)
    size = min(_WANTED, _WANTED if free is None else free // 4)
    if size < 1 << 26:
        raise UsageError(
            f"too little memory is free on {device} to measure its bandwidth; give it, such as "
            "80GB/s"
        )
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends or best == float("inf"):
        started = time.perf_counter()
        numbers.sum().item()  # .item() waits for the device
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best
