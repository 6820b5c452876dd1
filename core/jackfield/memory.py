"""How much memory there is, and what of it keys and values can have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.contracts.requirements import BYTES, Requirements

_CGROUP = Path("/sys/fs/cgroup")
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def free_bytes(device: str | None) -> int | None:
    """Memory that can be had on a torch device now, in bytes; None where nobody tells.

    Imports torch for a GPU only.
    """
    kind, _, index = (device or "cpu").partition(":")
    if kind in ("cuda", "xpu"):
        import torch

        free, _ = getattr(torch, kind).mem_get_info(int(index) if index else None)
        return int(free)
    if device == "mps":
        import torch

        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return _free_host_bytes()


def _free_host_bytes() -> int | None:
    """What the kernel says is available, and no more than the container may still have."""
    found = []
    if hasattr(os, "sysconf"):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if said := re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo"))):
        found.append(int(said[1]) * 1024)
    most, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        # Files that were read and are not in use count as used, and go as soon as memory is wanted.
        idle = re.search(r"^inactive_file (\d+)", _read(_CGROUP / "memory.stat"), re.M)
        found.append(max(0, int(most) - int(used) + int(idle[1] if idle else 0)))
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def known(numbers: tuple[int, ...]) -> bool:
    """Whether every layer keeps something for each token, and how much is known."""
    return bool(numbers) and all(numbers)


def kv_bytes(requirements: Requirements, tokens: int) -> int:
    """Bytes of the keys and values of one request with `tokens` tokens, windows cut, no padding."""
    numbers = sum(
        count * (tokens if window is None else min(tokens, window))
        for count, window in zip(requirements.kv_numbers, requirements.windows, strict=True)
    )
    return numbers * BYTES[requirements.dtype]


@dataclass(frozen=True)
class CacheMemory:
    """What the keys and values of a plan cost, and what fits.

    `available` bytes are there for them: the pool where it is fixed, otherwise what is free on the
    device, less the weights. `request_bytes` maps a request's tokens, prompt and new ones together,
    to the bytes that it holds at most.
    """

    available: int
    context_length: int | None
    request_bytes: Callable[[int], int]

    @property
    def bytes_per_token(self) -> int:
        """What a short request costs per token, before any window is full; pages counted whole."""
        return -(-self.request_bytes(1024) // 1024)

    def requests(self, tokens: int) -> int:
        """How many requests of `tokens` tokens fit together."""
        return self.available // self.request_bytes(tokens)

    @property
    def longest(self) -> int:
        """The longest single request that fits, in tokens, prompt and new ones together."""
        low, high = 0, self.context_length or self.available + 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle) <= self.available:
                low = middle
            else:
                high = middle - 1
        return low

    def to_dict(self) -> dict[str, Any]:
        return {
            "available_bytes": self.available,
            "bytes_per_token": self.bytes_per_token,
            "longest_request": self.longest,
            "requests_that_fit": {tokens: self.requests(tokens) for tokens in self._lengths()},
        }

    def _lengths(self) -> list[int]:
        most = self.longest
        return [n for n in (256, 1024, 4096, 16384, 65536) if n < most] + ([most] if most else [])

    def __str__(self) -> str:
        fit = ", ".join(f"{self.requests(n)} of {n}" for n in self._lengths())
        return (
            f"{self.bytes_per_token} bytes a token, {in_units(self.available)} for them: "
            f"requests that fit together, by their tokens: {fit or 'none'}"
        )


def in_units(count: int) -> str:
    """1234567 as '1.2 MB'."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"
