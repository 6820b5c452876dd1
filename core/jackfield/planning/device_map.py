"""Where a caller wants the weights: `device_map` and `max_memory`, checked. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.bridge.placement import DISK
from jackfield.errors import UsageError, quoted
from jackfield.paths import why_no_folder
from jackfield.spelling import AUTO
from jackfield.units import parse_bytes

#: Ways to spread weights, in accelerate's words; "auto" does so only where no device holds all.
STRATEGIES = (AUTO, "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Asked:
    """What a caller says about places, its form checked.

    `device_map` is a strategy, a device, or module name -> place; `max_memory` place -> bytes.
    `device_memory` are the bytes of one device that need not be here: all is planned for that one.
    """

    device_map: str | Mapping[str, str] = AUTO
    max_memory: Mapping[str, int] | None = None
    offload_folder: Path | None = None
    device_memory: int | None = None

    @property
    def is_strategy(self) -> bool:
        return self.device_map in STRATEGIES

    @property
    def is_plain(self) -> bool:
        """Whether one device is to do, with nothing said about memory or folders."""
        return self.max_memory is None and self.offload_folder is None


def asked(device_map: Any, max_memory: Any = None, offload_folder: Any = None) -> Asked:
    """Check the form of the three arguments. Raises UsageError."""
    if isinstance(device_map, Mapping):
        where: str | dict[str, str] = _modules(device_map)
    elif type(device_map).__module__ == "torch":  # a torch.device
        where = str(device_map)
    elif isinstance(device_map, bool) or not (isinstance(device_map, str | int)):
        raise UsageError(
            f"device_map must be {', '.join(map(repr, STRATEGIES))}, a device or a dict of module "
            f"-> device, not {device_map!r}"
        )
    else:
        where = _place(device_map)
        if where == DISK:
            where = {"": DISK}
    memory = None if max_memory is None else _memory(max_memory)
    if memory is not None and isinstance(where, dict):
        raise UsageError("a device_map of modules says where all goes; drop max_memory")
    folder = _folder(offload_folder)
    named = isinstance(where, str) and where not in STRATEGIES
    if folder is not None and (named or (isinstance(where, dict) and DISK not in where.values())):
        raise UsageError(
            f"offload_folder is for weights on disk, and device_map={device_map!r} puts none "
            "there; drop it, or name 'auto'"
        )
    return Asked(where, memory, folder)


def _place(place: Any) -> str:
    """A device's name; a number is a CUDA device, as in accelerate."""
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def _modules(device_map: Mapping[Any, Any]) -> dict[str, str]:
    if not device_map:
        raise UsageError("device_map is an empty dict; give module -> device, or 'auto'")
    for name, place in device_map.items():
        told = str(place)  # a torch.device too
        if not isinstance(name, str) or isinstance(place, bool) or not told or told in STRATEGIES:
            raise UsageError(
                f"device_map must map names of modules to devices or 'disk', not {name!r} to "
                f"{place!r}"
            )
    return {name: _place(place) for name, place in device_map.items()}


def _memory(max_memory: Any) -> dict[str, int]:
    if not isinstance(max_memory, Mapping) or not max_memory:
        raise UsageError(
            "max_memory must be a dict of device -> size such as {'cpu': '4GB', 0: '10GB'}, not "
            f"{max_memory!r}"
        )
    found: dict[str, int] = {}
    for place, size in max_memory.items():
        if isinstance(place, bool) or not isinstance(place, str | int):
            raise UsageError(f"max_memory: {place!r} is not a device")
        digits = isinstance(place, str) and place.isdecimal()
        name = _place(int(place) if digits else place)
        if name in found:
            raise UsageError(f"max_memory names {name} twice; name it once")
        bare = isinstance(size, str) and size.strip().isdecimal()  # bytes, on the command line
        found[name] = parse_bytes(int(size) if bare else size, f"max_memory of {name}")
    return found


def _folder(folder: Any) -> Path | None:
    if folder is None:
        return None
    if not isinstance(folder, str | Path) or not str(folder):
        raise UsageError(f"offload_folder must be a folder's path, not {folder!r}")
    path = Path(folder)
    if (why := why_no_folder(path)) is not None:
        raise UsageError(
            f"offload_folder={quoted(str(folder))} cannot be used: {why}; name a folder"
        )
    return path
