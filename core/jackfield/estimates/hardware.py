"""Devices that a plan can be asked about by name, as their makers' data sheets have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device: what torch calls its kind, bytes of memory, bytes a second, and FLOP a second.

    `flops` are those of dense products of 16-bit numbers, summed in 32 bits.
    """

    kind: str
    memory: int
    bandwidth: float
    flops: float


def _gpu(gigabytes: int, gigabytes_a_second: int, teraflops: int) -> Hardware:
    return Hardware("cuda", gigabytes * 10**9, gigabytes_a_second * 1e9, teraflops * 1e12)


#: torch calls AMD's devices "cuda", too.
HARDWARE = {
    "t4": _gpu(16, 320, 65),
    "a10": _gpu(24, 600, 125),
    "l4": _gpu(24, 300, 121),
    "l40s": _gpu(48, 864, 362),
    "rtx-4090": _gpu(24, 1008, 165),
    "rtx-5090": _gpu(32, 1792, 209),
    "a100-40gb": _gpu(40, 1555, 312),
    "a100": _gpu(80, 2039, 312),
    "h100": _gpu(80, 3350, 989),
    "h200": _gpu(141, 4800, 989),
    "b200": _gpu(180, 8000, 2250),
    "mi300x": _gpu(192, 5300, 1307),
    "mi325x": _gpu(256, 6000, 1307),
}


def hardware(name: object) -> Hardware | None:
    """The device of that name, in whatever case; None: no such name."""
    return HARDWARE.get(name.lower()) if isinstance(name, str) else None
