"""What surrounds a call in its own thread, and would not be so in the engine's."""

from __future__ import annotations

import torch

from jackfield.errors import UsageError


def refuse_autocast(device_type: str) -> None:
    """Raise UsageError inside of `torch.autocast`, of which an engine's thread knows nothing.

    An engine computes in the dtype that was planned, whoever calls it.
    """
    if not torch.is_autocast_enabled(device_type):
        return
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    raise UsageError(
        f"torch.autocast(dtype={dtype}) is on around this call, and an engine computes in the "
        "dtype that it was planned with, in a thread that the block does not reach; call it "
        f"outside, or choose with jackfield.load(…, dtype={dtype!r})"
    )
