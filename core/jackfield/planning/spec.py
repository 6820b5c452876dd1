"""The arguments of `jackfield.plan` and `jackfield.load` with their defaults.

One record is made where a call begins, and handed on whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.planning.memory import STEP_ROWS
from jackfield.planning.profiles import Taken
from jackfield.planning.solving import ARGUMENTS
from jackfield.requests.arguments import DeviceMap, Strategies
from jackfield.spelling import AUTO, Quantizable, Selectable


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What a caller of `jackfield.plan` says beside the model (`PlanArguments`).

    `device_memory` None: a plan for this machine. Otherwise for one device of so many bytes, which
    need not be here. What `profile` offers and nobody named is among the other arguments already.
    """

    attn_implementation: Selectable = AUTO
    cache_implementation: Selectable = AUTO
    quantization: Quantizable = AUTO
    decoding: Strategies = AUTO
    assistant_model: Any = None
    assistant: Mapping[str, Any] | None = None
    scheduler: Selectable = AUTO
    compile: Selectable | bool = AUTO
    kernels: Selectable = AUTO
    dtype: Any = AUTO
    device_map: DeviceMap = AUTO
    max_memory: Any = None
    offload_folder: Any = None
    adapter: Any = None
    merge_adapter: bool = False
    adapters: Mapping[str, Any] | None = None
    revision: str | None = None
    deterministic: bool = False
    locked: str | Path | None = None
    profile: Taken | None = None
    tp_plan: str | None = None
    tp_size: int | None = None
    expert_parallel: bool = False
    device_memory: int | None = None

    @property
    def selections(self) -> dict[str, Any]:
        """What selects a backend of each kind."""
        return {kind: getattr(self, name) for kind, name in ARGUMENTS.items()}


@dataclass(frozen=True, kw_only=True)
class LoadSpec(PlanSpec):
    """What a caller of `jackfield.load` says beside the model (`LoadArguments`)."""

    tokenizer: Any = None
    max_adapters: int = 8
    max_batch_size: int = STEP_ROWS
    max_batch_tokens: int | None = None
    prefill_chunk_size: int | None = None
    target_step_seconds: float | None = None
    max_waiting: int | None = None
    stall_after: float = 60.0
    image_hosts: Any = None
    verify: bool | int = False
