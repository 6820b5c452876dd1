"""Which weights lie where, as a plan says it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jackfield.units import in_units

DISK = "disk"

_SHOWN = 3  # module names of a place in one line of text


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
