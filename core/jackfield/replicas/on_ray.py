"""What Ray calls: the router in front of replicas, and the replica as a deployment.

Imported only where Ray is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util import get_current_placement_group

from jackfield.replicas.calls import (
    Began,
    Call,
    LineCall,
    Messages,
    ReplicaLostError,
    Routed,
)
from jackfield.replicas.encryption import context
from jackfield.replicas.prefixes import OpenRequests, Prefixes
from jackfield.replicas.rank_group import RankGroup
from jackfield.replicas.receiving import Answer, Incoming
from jackfield.replicas.replica import Replica
from jackfield.replicas.sending import Outgoing

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from jackfield.batch.answering import Ran
    from jackfield.batch.lines import Json
    from jackfield.engine.report import Report
    from jackfield.serving.errors import ApiError
    from jackfield.serving.settings import ServerSettings

_LOST = (RayActorError, DeploymentUnavailableError)
_TOLD_WITHIN = 5.0  # seconds for replicas to say what they have counted, or that they end
_LOOK_EVERY = 0.2

logger = logging.getLogger("jackfield.serving")


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types where it is not there
    """Has `Prefixes` choose. It runs in the process that asks, in a loop of its own."""

    def initialize_state(self, **_: Any) -> None:
        self._prefixes, self._requests = Prefixes(), OpenRequests()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where none of them takes it
        call = next((given for given in pending_request.args if isinstance(given, Routed)), None)
        if call is None:  # a question to any of them
            return [candidate_replicas]
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        there = {name: replica for name, replica in found.items() if name not in call.lost}
        if not there:
            return []
        if call.to is not None and call.to in there:
            names = [call.to]
        else:
            names = self._prefixes.choose(call.blocks, self._requests.loads(there))
        self._begin(pending_request, names[0])
        return [[there[name]] for name in names]

    def _begin(self, pending: PendingRequest, name: str) -> None:
        request = pending.metadata.internal_request_id
        self._requests.begin(request, name)

        def given_up(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                self._requests.end(request, name)

        pending.future.add_done_callback(given_up)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """It may have gone to another than the first."""
        self._requests.begin(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._requests.end(internal_request_id, replica_id.unique_id)


class Deployed:
    """A replica as Ray Serve runs it."""

    async def __init__(  # type: ignore[misc]  # which Ray awaits
        self, settings: ServerSettings, expected: Mapping[str, str]
    ) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        group = get_current_placement_group()
        ranks = None if group is None else RankGroup(group)
        self._replica = await asyncio.to_thread(Replica, settings, expected, name)
        if ranks is None:
            await self._replica.open()
        else:
            await ranks.start(settings)
            await ranks.unless_one_ends(self._replica.open())
        self._outgoing = Outgoing(name, context(ssl.PROTOCOL_TLS_CLIENT))
        self._watching = asyncio.create_task(self._watch(ranks))

    async def _watch(self, ranks: RankGroup | None) -> None:
        """End this process where an engine or a rank is lost: Ray starts another at once."""
        while not (why := self._replica.lost or (ranks and ranks.why())):
            await asyncio.sleep(_LOOK_EVERY)
        logger.error("this replica ends: %s", why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_WITHIN):
                while self._outgoing.busy:
                    await asyncio.sleep(_LOOK_EVERY)
        os._exit(1)

    async def answer(self, call: Call) -> None:
        """Return once its answer has been brought to `call.reply`."""
        await self._outgoing.bring(call, self._replica.answer)

    async def line(self, call: LineCall) -> tuple[str, str, Json | ApiError | None]:
        """Who answers, what it runs, and the answer; None: this replica is lost."""
        try:
            found = await self._replica.line(call)
        except ReplicaLostError:
            found = None
        return self._replica.name, self._replica.made, found

    async def ran(self) -> tuple[str, Ran]:
        """What makes answers, shortly and at length."""
        return self._replica.made, self._replica.ran

    async def report(self) -> Report:
        return self._replica.engine.report()

    async def metrics(self) -> tuple[str, bytes]:
        return await asyncio.to_thread(self._replica.metrics)

    async def plans(self) -> list[str]:
        return self._replica.plans

    async def check_health(self) -> None:
        """Ray asks every few seconds, and replaces a replica that raises."""
        self._replica.check()

    async def __del__(self) -> None:
        """Ray calls it once requests have ended."""
        if (watching := getattr(self, "_watching", None)) is not None:
            watching.cancel()
        if (replica := getattr(self, "_replica", None)) is not None:
            await replica.close()


class RayReplicas:
    """The replicas of a deployment, asked through Ray; what they answer comes in at `host`.

    Used in one event loop.
    """

    def __init__(self, handle: DeploymentHandle[Any], host: str) -> None:
        self._handle = handle
        self._incoming = Incoming(host, context(ssl.PROTOCOL_TLS_SERVER))
        self._watching: set[asyncio.Task[None]] = set()

    async def ask(self, call: Call) -> AsyncGenerator[Began | Messages, None]:
        async with self._incoming.opened() as answer:
            asked = self._handle.answer.remote(replace(call, reply=answer.reply))
            watching = asyncio.create_task(self._watch(asked, answer))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            try:
                async for said in answer:
                    yield said
            except (GeneratorExit, asyncio.CancelledError):  # whoever asked has gone
                asked.cancel()
                watching.cancel()
                raise

    async def _watch(self, asked: Any, answer: Answer) -> None:
        """Wait until Ray says that the call is over: where it failed, nothing more comes."""
        try:
            await asked
        except _LOST as error:
            answer.fail(ReplicaLostError(type(error).__name__))
        except Exception as error:  # noqa: BLE001 - raised to who waits for the answer
            answer.fail(error)

    async def metrics(self) -> Mapping[str, bytes]:
        try:
            asked = self._handle.broadcast("metrics")
            return dict(await asked.results_async(timeout_s=_TOLD_WITHIN))
        except (*_LOST, TimeoutError):
            return {}
