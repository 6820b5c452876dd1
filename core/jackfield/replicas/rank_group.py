"""The processes that share the model of one replica: actors of Ray in its placement group.

The replica is rank 0. A rank that ends is a replica that ends, and its placement group with it.
Imported only where Ray is there.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import jackfield.api
from jackfield.errors import ExecutionError, error_text
from jackfield.serving.settings import ServerSettings

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class Rank:
    """Another rank than 0, as Ray runs it."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def follow(self, settings: ServerSettings, environment: dict[str, str]) -> None:
        """Follow rank 0, as `environment` says where, until it closes its engine."""
        os.environ.update(environment)
        (model,) = settings.models.values()
        try:
            jackfield.api.load(model.model, **model.arguments)
        except SystemExit:  # how following ends
            return


class RankGroup:
    """The other ranks of this process, which is rank 0 from now on.

    They are in the bundles of its placement group that follow its own.
    """

    def __init__(self, group: PlacementGroup) -> None:
        self._port = socket.socket()  # held, so that nobody else is given it meanwhile
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        self._ranks = [
            ray.remote(Rank).options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            for number, bundle in enumerate(group.bundle_specs) if number
        ]  # fmt: skip
        self._gpus = "GPU" in group.bundle_specs[0]
        self._ends: list[asyncio.Future[None]] = []

    async def start(self, settings: ServerSettings) -> None:
        """Have them load the model of `settings`, and follow."""
        own = ray.get_runtime_context().get_node_id()
        nodes = [own, *await asyncio.gather(*(rank.node.remote() for rank in self._ranks))]
        address = ray.util.get_node_ip_address()
        first, *others = environments(nodes, address, self._port.getsockname()[1], self._gpus)
        os.environ.update(first)
        for rank, environment in zip(self._ranks, others, strict=True):
            end = rank.follow.remote(settings, environment)
            self._ends.append(asyncio.wrap_future(end.future()))

    async def unless_one_ends(self, act: Awaitable[None]) -> None:
        """Wait for `act`. Raises ExecutionError where a rank ends before."""
        acting = asyncio.ensure_future(act)
        await asyncio.wait([acting, *self._ends], return_when=asyncio.FIRST_COMPLETED)
        if not acting.done():
            acting.cancel()
            raise ExecutionError(self.why() or "a rank has ended")
        await acting

    def why(self) -> str | None:
        """Which rank has ended, and how; None: all run."""
        for rank, end in enumerate(self._ends, 1):
            if end.done():
                error = end.exception()
                cause = getattr(error, "cause", error)  # Ray's own wraps that of the rank
                how = "" if cause is None else f" ({error_text(cause)})"
                return f"rank {rank} of the {len(self._ends) + 1} processes has ended{how}"
        return None


def environments(nodes: Sequence[str], address: str, port: int, gpus: bool) -> list[dict[str, str]]:
    """What torchrun would say to each rank; `nodes` are the machines on which they are.

    Ray shows each process its own GPU alone, which is the first there.
    """
    found = []
    for rank, node in enumerate(nodes):
        beside = [other for other, where in enumerate(nodes) if where == node]
        found.append({
            "RANK": str(rank), "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": "0" if gpus else str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": "1" if gpus else str(len(beside)),
            "MASTER_ADDR": address, "MASTER_PORT": str(port),
        })  # fmt: skip
    return found
