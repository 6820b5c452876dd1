"""Several processes become the ranks of one model: they meet, and agree on what they run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.adapter_files import WEIGHTS
from jackfield.bridge.shard_trial import shard_trial
from jackfield.contracts.quantizing import plain_bytes
from jackfield.devices import free_bytes
from jackfield.errors import PlanError, UsageError, error_text
from jackfield.parallel.meeting import found, hosted, join, lead, share_tensors
from jackfield.parallel.processes import Processes
from jackfield.parallel.ranks import Ranks
from jackfield.parallel.world import world_of
from jackfield.planning.locking import lock_of

if TYPE_CHECKING:
    from jackfield.bridge.sharding import Shard
    from jackfield.bridge.source import ModelSource
    from jackfield.planning.deciding import Job
    from jackfield.planning.planning import Plan
    from jackfield.registry.backends import Registry

_LIBRARIES = ("jackfield", "torch", "transformers")
_open: list[Ranks] = []  # one engine at a time: torch has one process group


@contextlib.contextmanager
def together(shard: Shard, device: torch.device, given: Mapping[str, Any]) -> Iterator[Ranks]:
    """The ranks of a model, found under torchrun, or started by this process.

    `given` are the arguments of `jackfield.load`, which processes that are started here call.
    Leaving it lets the other ranks end. Raises ExecutionError where they do not meet, UsageError
    where this process shares another model.
    """
    if _open:
        raise UsageError(
            "this process shares a model with others already, and torch has one group of them; "
            "close that engine first"
        )
    world = world_of()
    with contextlib.ExitStack() as stack:
        if world is None:
            threads = _threads(shard.size, device, stack)
            store, port = hosted(shard.size)
            started = Processes(given, shard.size, port, threads)
            stack.callback(started.close)
            address = "127.0.0.1"
            ranks: Ranks = lead(store, address, shard.size, started.any_ended, started.ended)
        else:
            store = found(world)
            first = world.rank == 0
            ranks = lead(store, world.address, world.size) if first else join(store, world)
        _open.append(ranks)
        stack.callback(_open.clear)
        stack.callback(ranks.close)
        stack.callback(share_tensors(store, ranks, device))
        try:
            yield ranks
        except SystemExit:  # of another rank, at its end
            raise
        except BaseException as error:
            ranks.fail(f"rank {ranks.rank}: {error_text(error)}")
            raise


def _threads(size: int, device: torch.device, stack: contextlib.ExitStack) -> int | None:
    """How many threads each rank of this machine computes with; None: it is said already."""
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // size))
    stack.callback(torch.set_num_threads, before)
    return torch.get_num_threads()


def agree(ranks: Ranks, plan: Plan, job: Job, registry: Registry) -> None:
    """Compare what all ranks have installed and planned. Raises UsageError, in all of them."""
    records = ranks.exchange(_record(plan, job, registry))
    found = [
        f"{what} is {there} on rank {rank} and {here} on rank 0"
        for rank, record in enumerate(records)
        for what, here, there in _differences("", records[0], record)
    ]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise UsageError(
            "the processes of one model must have the same installed, and be told the same: "
            f"{'; '.join(found[:3])}{more}"
        )


def _record(plan: Plan, job: Job, registry: Registry) -> dict[str, Any]:
    config = json.dumps(job.source.config.to_dict(), default=str, sort_keys=True)
    adapters = held.loras if (held := job.held(plan, 1)) else {}
    lock = lock_of(plan)
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "plugin": {
            f"{one.distribution} {one.entry_point}": f"{one.version}, {one.state}"
            for one in registry.plugins
        },
        "backend": lock["backends"],
        "adapter": {
            name: hashlib.sha256((one.folder / WEIGHTS).read_bytes()).hexdigest()[:12]
            for name, one in adapters.items()
        },
        "the model's config": hashlib.sha256(config.encode()).hexdigest()[:12],
        "expert_parallel": plan.requirements.expert_parallel,
        "dtype": plan.requirements.dtype,
        "device": plan.requirements.device,
    }


def _differences(what: str, here: Any, there: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted({*here, *there}):
            missing = "missing"
            yield from _differences(
                f"{what} {name}".strip(), here.get(name, missing), there.get(name, missing)
            )
    elif isinstance(here, dict) or isinstance(there, dict):
        yield (
            what,
            "there" if isinstance(here, dict) else here,
            ("there" if isinstance(there, dict) else there),
        )
    elif here != there:
        yield what, here, there


def prove(ranks: Ranks, plan: Plan, source: ModelSource, shard: Shard) -> None:
    """Have a small model of this kind shared first. Raises PlanError, in all ranks.

    Before any weight of the large one is read.
    """
    needs = plan.requirements
    stored = needs.weight_bytes != plain_bytes(needs)
    why = shard_trial(source.config, shard, needs.experts_implementation, stored=stored)
    found = ranks.exchange(why)
    if why := next(filter(None, found), None):
        one = "load it in one process"
        other = f"drop expert_parallel, or {one}" if shard.experts else one
        raise PlanError(f"tp_size={shard.size} cannot run {needs.architecture}: {why}; {other}")


def agreed_bytes(ranks: Ranks, device: torch.device) -> int | None:
    """What each rank may count on being free on its device, in bytes; None: nobody tells.

    Ranks on one CPU share it.
    """
    here = free_bytes(str(device))
    world = world_of()
    beside = (world.local_size if world else ranks.size) if device.type == "cpu" else 1
    told = ranks.exchange(None if here is None else here // beside)
    return None if None in told else min(told)
