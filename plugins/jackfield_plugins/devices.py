"""The current device, which launches, streams and memory without a device's name go to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current device; it need not be the one where a model's tensors are."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(device)
