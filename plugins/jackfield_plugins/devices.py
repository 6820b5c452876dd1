"""The current device, which launches, streams and memory without a device's name go to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from jackfield.contracts import Requirements


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current device; it need not be the one where a model's tensors are."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(device)


def capabilities(requirements: Requirements) -> list[tuple[int, int]]:
    """The compute capability of each CUDA GPU that a model computes on; none of one elsewhere."""
    import torch

    if requirements.elsewhere or not torch.cuda.is_available():
        return []
    devices = [d for d in requirements.computing_devices if d.partition(":")[0] == "cuda"]
    return [torch.cuda.get_device_capability(device) for device in devices]


def capabilities_here() -> list[tuple[int, int]]:
    """The compute capability of each CUDA GPU of this machine."""
    import torch

    return [torch.cuda.get_device_capability(at) for at in range(torch.cuda.device_count())]
