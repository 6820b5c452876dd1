"""An adapter, as a plan and a report name it. Needs neither torch nor PEFT."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """An adapter on top of a model's weights, or, `merged`, added into them.

    `location` is a folder or hub id, or the name under which a live model has it. `peft_type` is
    PEFT's ("LORA"), `rank` the largest of its targets, None where the type has none; `targets` is
    how many modules it changes.
    """

    location: str
    peft_type: str
    rank: int | None
    targets: int
    merged: bool = False
    #: whether it brings biases of its own in place of the model's
    biases: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        how = "merged into" if self.merged else "on"
        return f"{self.location} ({self.peft_type}{rank} {how} {self.targets} modules)"


@dataclass(frozen=True)
class AdapterUse:
    """What was found of an adapter in the modules that ran: `state` is "on", "off" or "merged"."""

    adapter: Adapter
    state: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.adapter.to_dict(), "state": self.state}

    def __str__(self) -> str:
        off = ", switched off" if self.state == "off" else ""
        return f"adapter {self.adapter}{off}"
