"""Which weights lie where: what a caller asks for, and what a plan says. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError
from jackfield.spelling import AUTO
from jackfield.units import in_units, parse_bytes

DISK = "disk"

#: A strategy, a device, or the name of a module -> a device or "disk". A number is a CUDA device.
DeviceMap = str | int | Mapping[str, str | int]

#: Ways to spread weights, in accelerate's words; "auto" does so only where no device holds all.
STRATEGIES = (AUTO, "balanced", "balanced_low_0", "sequential")

_SHOWN = 3  # module names of a place in one line of text


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
    if path.exists() and not path.is_dir():
        raise UsageError(f"offload_folder={str(folder)!r} is not a folder; name one")
    return path


def spell(modules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """`modules` for each of `names`: the longest name in it that is the name or above it wins."""
    found = {}
    for name in names:
        above = name
        while above not in modules and above:
            above = above.rpartition(".")[0]
        if above in modules:
            found[name] = modules[above]
    return found


@dataclass(frozen=True)
class Placement:
    """Where weights lie. `device` is where a step begins and logits come back.

    `modules` maps module names to places, ``{"": device}`` where all of them are in one;
    `sizes` maps a place to the bytes of the weights there. What lies on the CPU beside a GPU, or
    on disk, is brought to where it is computed when it is needed.
    """

    device: str
    modules: Mapping[str, str]
    sizes: Mapping[str, int]

    @property
    def spread(self) -> bool:
        """Whether weights are in several places, or on disk."""
        return set(self.modules.values()) != {self.device}

    @property
    def execution_devices(self) -> tuple[str, ...]:
        """The devices that compute, the first one first."""
        found = [p for p in self.modules.values() if p not in ("cpu", DISK)] or [self.device]
        return tuple(dict.fromkeys([self.device, *found]))

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The places that only hold weights."""
        return tuple(sorted(set(self.modules.values()) - set(self.execution_devices)))

    def at(self, place: str) -> list[str]:
        return [name for name, where in self.modules.items() if where == place]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "execution_devices": list(self.execution_devices),
            "modules": dict(self.modules),
            "bytes": dict(self.sizes),
        }

    def __str__(self) -> str:
        if not self.spread:
            return f"all weights on {self.device}, {in_units(self.sizes.get(self.device, 0))}"
        return "; ".join(
            f"{in_units(size)} on {place} ({_some(self.at(place))})"
            for place, size in self.sizes.items()
        )


def _some(names: list[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names) or "an adapter"
    return f"{names[0]} … {names[-1]}, {len(names)} modules"
