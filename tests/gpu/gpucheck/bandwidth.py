"""How fast a device's memory is read and written at best."""

from __future__ import annotations

import torch

from gpucheck.bench import Bench

COPIES = 10


def copied(bench: Bench) -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = torch.empty(2, bench.sizes.copied, dtype=torch.uint8, device=bench.device.name)
    target.copy_(source)
    best = min(bench.device.seconds(lambda: target.copy_(source)) for _ in range(COPIES))
    return 2 * source.numel() / best
