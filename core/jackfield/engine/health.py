"""The health of an engine, as a monitor reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Health:
    """How an engine is.

    `alive`: it is open. `ready`: it takes requests now. `stalled`: one step has been running for
    longer than `stall_after` seconds; `step_seconds` says for how long (0: none is running), and
    `inside` names what the step is inside of: a call of a plugin, code of a request, the model.
    `failure` is what made the last step fail, None when it did not.
    """

    alive: bool
    ready: bool
    stalled: bool
    step_seconds: float
    failure: str | None
    inside: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
