"""What a torch device has, where a model expects its inputs, and what must be off around it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_CGROUP = Path("/sys/fs/cgroup")


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a step's inputs belong. The first weight of a model that is spread may be on disk."""
    import torch

    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def refuse_autocast(device_type: str) -> None:
    """Raise UsageError inside of `torch.autocast`, of which an engine's thread knows nothing.

    An engine computes in the dtype that was planned, whoever calls it.
    """
    import torch

    if not torch.is_autocast_enabled(device_type):
        return
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    raise UsageError(
        f"torch.autocast(dtype={dtype}) is on around this call, and an engine computes in the "
        "dtype that it was planned with, in a thread that the block does not reach; call it "
        f"outside, or choose with jackfield.load(…, dtype={dtype!r})"
    )


def numbered(device: str | None) -> str:
    """The name of a device with its number: "cuda" is the GPU that is the current one.

    Imports torch for a GPU only.
    """
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cuda", "xpu"):
        return kind
    if index:
        return f"{kind}:{int(index)}"
    import torch

    gpu: Any = getattr(torch, kind)
    return f"{kind}:{gpu.current_device() if gpu.is_available() else 0}"


def free_bytes(device: str | None) -> int | None:
    """Memory that can be had on a torch device now, in bytes; None where nobody tells.

    `hand_back` comes first: between tensors that are there, torch may keep more that no large one
    fits in, and that is not counted. Imports torch for a GPU only.
    """
    kind, _, index = numbered(device).partition(":")
    if index:
        import torch

        hand_back(kind)
        free, _ = getattr(torch, kind).mem_get_info(int(index))
        return int(free)
    if kind == "mps":
        import torch

        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return _free_host_bytes()


def hand_back(kind: str) -> None:
    """Have torch give memory of GPUs that it keeps for tensors to come back to the driver.

    A small tensor that is put into what a pool of gigabytes has left behind holds all of it.
    """
    if kind in ("cuda", "xpu"):
        import torch

        getattr(torch, kind).empty_cache()


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


def name_of(device: str) -> str:
    """What the maker calls a torch device: the name of the GPU, or else of the processor."""
    if device.partition(":")[0] == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    names = re.findall(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.M)
    return names[0].strip() if names else platform.processor() or platform.machine()
