"""The arguments of `jackfield.load` and `jackfield.plan`, as a caller writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from jackfield.spelling import Quantizable, Selectable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: A strategy, a device, or the name of a module -> a device or "disk". A number is a CUDA device.
DeviceMap = str | int | Mapping[str, str | int]

#: What `decoding` may be: one selection, or those offered by name, the first one being the default.
Strategies = Selectable | Mapping[str, Selectable]


class PlanArguments(TypedDict, total=False):
    """What `jackfield.plan` takes beside the model; what is left out is "auto" or None."""

    attn_implementation: Selectable
    cache_implementation: Selectable
    quantization: Quantizable
    decoding: Strategies
    assistant_model: str | Path | PreTrainedModel | None
    assistant: Mapping[str, Any] | None
    scheduler: Selectable
    compile: Selectable | bool
    kernels: Selectable
    dtype: Any
    device_map: DeviceMap
    max_memory: Mapping[str | int, str | int] | None
    offload_folder: str | Path | None
    adapter: str | Path | None
    merge_adapter: bool
    adapters: Mapping[str, str | Path] | None
    revision: str | None
    deterministic: bool
    locked: str | Path | None
    profile: str | Path | None
    tp_plan: str | None
    tp_size: int | None
    expert_parallel: bool


class LoadArguments(PlanArguments, total=False):
    """What `jackfield.load` takes beside the model."""

    tokenizer: Any
    max_adapters: int
    max_batch_size: int
    max_batch_tokens: int | None
    prefill_chunk_size: int | None
    target_step_seconds: float | None
    max_waiting: int | None
    stall_after: float
    image_hosts: Sequence[str] | None
    verify: bool | int


OF_A_PLAN = frozenset(PlanArguments.__annotations__)
OF_LOADING = frozenset(LoadArguments.__annotations__)
