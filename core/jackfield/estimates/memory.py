"""How much memory there is, and what of it keys and values can have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.contracts.requirements import BYTES, Requirements
from jackfield.units import in_units

#: Of a step in the packed layout, and the sequences that run together, where nothing else is asked.
STEP_TOKENS, STEP_ROWS = 2048, 32

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: str | None) -> int | None:
    """Memory that can be had on a torch device now, in bytes; None where nobody tells.

    Imports torch for a GPU only.
    """
    kind, _, index = (device or "cpu").partition(":")
    if kind in ("cuda", "xpu"):
        import torch

        gpu: Any = getattr(torch, kind)
        number = int(index) if index else gpu.current_device()
        free, _ = gpu.mem_get_info(number)
        # What tensors have left behind, torch keeps for others.
        return int(free + max(0, gpu.memory_reserved(number) - gpu.memory_allocated(number)))
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


def step_bytes(needs: Requirements, tokens: int, rows: int) -> int:
    """What to leave free for a step beside weights and cache, in bytes; on the CPU nothing is.

    It feeds `tokens` tokens at most, and the logits of `rows` sequences are sampled from: as they
    are, in float32, and a copy. It is more than a dry run shows.
    """
    if needs.device == "cpu":
        return 0
    size, (vocabulary, _) = BYTES[needs.dtype], needs.head or (0, 0)
    return tokens * needs.token_numbers * size + rows * vocabulary * (size + 2 * BYTES["float32"])


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
    to the bytes that it holds at most. `needed` maps the tokens of each request and how many
    requests there are to all that they need at once; None: what they hold.
    """

    available: int
    context_length: int | None
    request_bytes: Callable[[int], int]
    needed: Callable[[int, int], int] | None = None

    @property
    def bytes_per_token(self) -> int:
        """What a short request costs per token, before any window is full; pages counted whole."""
        return -(-self.request_bytes(1024) // 1024)

    def fits(self, tokens: int, requests: int) -> bool:
        """Whether that many requests of `tokens` tokens fit together."""
        if self.needed is not None:
            return self.needed(tokens, requests) <= self.available
        return requests * self.request_bytes(tokens) <= self.available

    def requests(self, tokens: int) -> int:
        """How many requests of `tokens` tokens fit together."""
        most = self.available // self.request_bytes(tokens)
        return _largest(most, lambda count: self.fits(tokens, count))

    @property
    def longest(self) -> int:
        """The longest single request that fits, in tokens, prompt and new ones together."""
        most = self.context_length or self.available + 1
        return _largest(most, lambda tokens: self.fits(tokens, 1))

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


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, 0 for none; larger ones fit less."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
