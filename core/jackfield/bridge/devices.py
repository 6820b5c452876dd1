"""Which device a model computes on: names of devices, of this machine and of others."""

from __future__ import annotations

import torch

from jackfield.bridge.source import ModelSource
from jackfield.contracts.requirements import DEVICES
from jackfield.devices import input_device
from jackfield.errors import UsageError
from jackfield.spelling import AUTO


class ElsewhereError(UsageError):
    """A device that this machine has not."""


def pick_device(device: str | torch.device, source: ModelSource) -> torch.device:
    """ "auto" is where a live model is, otherwise the best single device of this machine.

    A torch.device need not be one of this machine.
    """
    if isinstance(device, torch.device):
        return device
    live = None if source.live is None else input_device(source.live)
    if device == AUTO:
        return live if live is not None else torch.device(best_device())
    found = check_device(device)
    if live is not None and found != live:
        raise UsageError(
            f"the model is on {live} and is used there; move it yourself, or drop "
            f"device_map={device!r}"
        )
    return found


def check_device(device: str) -> torch.device:
    """A device of this machine, from its name. Raises UsageError."""
    found = named_device(device)
    if not _is_mine(found):
        has = ", ".join(dict.fromkeys([*_devices(), "cpu"]))
        raise ElsewhereError(
            f"device_map={device!r} is not a device of this machine, which has {has}"
        )
    return found


def named_device(device: str) -> torch.device:
    """A device that models run on, here or elsewhere, from its name. Raises UsageError."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"device_map={device!r} is not a device of this machine or another: models run on "
            f"{', '.join(DEVICES)}"
        ) from None
    if found.type not in DEVICES:
        raise UsageError(f"device_map={device!r}: models run on {', '.join(DEVICES)}")
    return found


def is_here(device: torch.device) -> bool:
    """Whether this machine has it."""
    return device.type == "cpu" or any(d.partition(":")[0] == device.type for d in _devices())


def settle(model: torch.nn.Module) -> None:
    """Wait until what the calling thread told the devices of `model` is done.

    Its streams need not be those of the thread that will take steps, which nothing orders.
    """
    for device in {p.device for p in model.parameters()}:
        if device.type in ("cuda", "xpu"):
            getattr(torch, device.type).current_stream(device).synchronize()


def _is_mine(device: torch.device) -> bool:
    """Whether this machine has the very one. Asks no driver for memory, as a tensor would."""
    if device.type in ("cpu", "mps"):
        return is_here(device) and not device.index
    return f"{device.type}:{device.index or 0}" in _devices()


def _devices() -> list[str]:
    """What this machine has beside its CPU."""
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    found += [f"xpu:{number}" for number in range(torch.xpu.device_count())]
    return [*found, *(["mps"] if torch.backends.mps.is_available() else [])]


def best_device() -> str:
    """The kind of device that "auto" takes here."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
