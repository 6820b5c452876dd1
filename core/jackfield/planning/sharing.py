"""Checks `tp_size` and `tp_plan`, before any of the processes that share a model is started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jackfield.bridge.devices import best_device
from jackfield.bridge.sharding import Shard
from jackfield.errors import UsageError, quoted
from jackfield.parallel.world import world_of
from jackfield.planning.device_map import Asked
from jackfield.spelling import AUTO

if TYPE_CHECKING:
    from jackfield.bridge.source import ModelSource
    from jackfield.planning.spec import PlanSpec

TORCHRUN = "torchrun --nproc-per-node N"

#: arguments -> why they do not go with several processes
_WITHOUT = {
    "merge_adapter": "each process has a part of the weights, and adapters are added to whole ones",
    "max_memory": "each process has its own device, and an equal part of the weights",
    "offload_folder": "each process keeps its part of the weights on its device",
    "deterministic": "sums over processes may depend on the batch",
    "verify": "one process has not the whole model to compute it again",
}


def shard_of(spec: PlanSpec) -> Shard | None:
    """Which part of a model is planned; None: all of it, in one process. Raises UsageError.

    Under torchrun it is that of this process, elsewhere that of the first.
    """
    size, world = _size(spec), world_of()
    if type(spec.expert_parallel) is not bool:
        raise UsageError(f"expert_parallel is True or False, not {quoted(spec.expert_parallel)}")
    if size is None or size == 1:
        if spec.expert_parallel:
            raise UsageError(
                "expert_parallel=True hands the experts of a mixture out to the processes that "
                "share a model, and there is one; add tp_size=N, or drop it"
            )
        return None
    for name, why in _WITHOUT.items():
        if getattr(spec, name, None):
            raise UsageError(f"{name} does not go with tp_size={size}: {why}; drop one of them")
    return Shard(size, world.rank if world else 0, spec.expert_parallel)


def _size(spec: PlanSpec) -> int | None:
    plan, size, world = spec.tp_plan, spec.tp_size, world_of()
    if plan not in (None, AUTO):
        raise UsageError(f"tp_plan={plan!r}: write tp_plan='auto', which is transformers' own plan")
    if size is not None and (type(size) is not int or size < 1):
        raise UsageError(f"tp_size is a number of processes from 1 on, not {size!r}")
    if plan is None and size is None:
        return None
    if world is None:
        if size is None:
            raise UsageError(
                f"tp_plan='auto' shares the model among the processes of {TORCHRUN}, and this one "
                "was not started so; say how many with tp_size=N"
            )
        return size
    if size not in (None, world.size):
        raise UsageError(
            f"tp_size={size}, and torchrun started {world.size} processes (WORLD_SIZE); give one"
        )
    return world.size


def check_shared(source: ModelSource, shard: Shard) -> None:
    """Raise UsageError where weights are not files that each process reads its part of."""
    if source.live is not None or source.gguf is not None:
        what = "a GGUF file" if source.live is None else "a live model"
        raise UsageError(
            f"tp_size={shard.size} shares models that are read from safetensors, and {what} is "
            "not; give the model's folder or hub id"
        )


def own_device(asked: Asked, shard: Shard) -> Asked:
    """`asked`, with the device of this process, the one with its number. Raises UsageError."""
    if asked.device_memory is not None:
        return asked
    world, best = world_of(), best_device()
    if best not in ("cpu", "cuda"):
        raise UsageError(
            f"tp_size={shard.size} shares models among CPUs or CUDA devices, not {best}"
        )
    number = world.local_rank if world else 0
    own = best if best == "cpu" else f"{best}:{number}"
    if asked.device_map not in (AUTO, best, own):
        raise UsageError(
            f"device_map={asked.device_map!r} does not go with tp_size={shard.size}: each process "
            f"has a device of its own, here {own}; drop it"
        )
    return replace(asked, device_map=own)
