"""A replica: the server's own application in a process of Ray, asked without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

import jackfield.api
from jackfield.batch.answering import Ran, answer_to, ran
from jackfield.batch.lines import Json
from jackfield.engine.engine import Engine
from jackfield.errors import ExecutionError
from jackfield.planning.locking import lock_of
from jackfield.registry.discovery import installed
from jackfield.replicas.calls import Call, LineCall, ReplicaLostError
from jackfield.serving.answering import Answering
from jackfield.serving.app import create_app
from jackfield.serving.errors import ApiError
from jackfield.serving.guards import Send
from jackfield.serving.pool import Load, Pool
from jackfield.serving.settings import ServerSettings

_LIBRARIES = ("jackfield", "torch", "transformers")
_LEAVES_WITHIN = 10.0  # seconds for an answer to end that nobody waits for


def versions() -> dict[str, str]:
    """What must be alike wherever the same models are served."""
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in _LIBRARIES}
    entry_points, _ = installed()
    return found | {each.dist.name: each.dist.version for each in entry_points if each.dist}


def settings_of_replica(settings: ServerSettings) -> ServerSettings:
    """`settings` of a whole server as each replica has them.

    Rates and sites are looked at once, in front of all replicas. An engine that hangs is not loaded
    again: the replica is replaced.
    """
    free = {"requests_per_minute": None}
    keys = {name: key.model_copy(update=free) for name, key in settings.keys.items()}
    return settings.model_copy(update={"keys": keys, "cors_origins": [], "restarts": 0})


class Replica:
    """Answers requests with the application of `settings`.

    `expected` are the `versions` of the server in front; another one here is an error by its name.
    """

    def __init__(
        self,
        settings: ServerSettings,
        expected: Mapping[str, str],
        name: str = "replica",
        load: Load = jackfield.api.load,
    ) -> None:
        check_versions(expected, versions(), name)
        self._settings, self.name = settings_of_replica(settings), name
        self._app = create_app(self._settings, load)
        self._stack = contextlib.AsyncExitStack()
        self.plans: list[str] = []

    @property
    def pool(self) -> Pool:
        pool: Pool = self._app.state.pool
        return pool

    async def open(self) -> None:
        """Load what is loaded before requests come, what processes share among it: they wait for
        one another. Raises what loading raises.
        """
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        shared = any((m.arguments.get("tp_size") or 1) > 1 for m in self._settings.models.values())
        if shared or self._settings.preloads:
            await self.pool.preload(self.plans.append)

    async def close(self) -> None:
        await self._stack.aclose()

    @property
    def lost(self) -> str | None:
        """Why an engine is out of service, so that only another replica helps; None: none is."""
        for name, served in self.pool.models.items():
            if (engine := served.engine) is not None and engine.closed:
                return f"{name}: {engine.health().failure or 'its engine was closed'}"
        return self.pool.lost

    def check(self) -> None:
        """Raise ExecutionError where an engine is lost."""
        if why := self.lost:
            raise ExecutionError(why)

    def metrics(self) -> tuple[str, bytes]:
        return self.name, self._app.state.metrics.show()

    async def answer(self, call: Call, send: Send) -> None:
        """Have the application send its answer; it is told that the client has gone when this is
        cancelled.

        Raises ReplicaLostError where an engine is lost before the end; nothing is sent after that.
        """
        whole = False

        async def unless_lost(message: Any) -> None:
            nonlocal whole
            if self.lost is None:
                await send(message)
                whole = message["type"] == "http.response.body" and not message.get("more_body")

        gone = asyncio.Event()
        body: list[Any] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Any:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(_scope(call), receive, unless_lost))
        try:
            await asyncio.wait({task})
            await task
        finally:
            gone.set()
            done, _ = await asyncio.wait({task}, timeout=_LEAVES_WITHIN)
            if not done:
                task.cancel()
        if not whole and (why := self.lost):
            raise ReplicaLostError(why)

    async def line(self, call: LineCall) -> Json | ApiError:
        """The body of the answer to a line of a batch job, or what it is refused with.

        Raises ReplicaLostError where an engine is lost before the end.
        """
        try:
            made: Answering = self._app.state.answering
            return await answer_to(call.line, call.name, call.began, made)
        except ApiError as error:
            if why := self.lost:
                raise ReplicaLostError(why) from None
            return error

    @property
    def ran(self) -> Ran:
        """What answers the lines of a batch job."""
        return ran(self.engine, self._settings)

    @functools.cached_property
    def made(self) -> str:
        """What stands for `ran`."""
        told = [lock_of(self.ran.plan), self.ran.more]
        text = json.dumps(told, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def engine(self) -> Engine:
        """That of the one model. Raises ExecutionError where it is lost."""
        (served,) = self.pool.models.values()
        if served.engine is None:
            raise ExecutionError(self.lost or "the engine is being loaded")
        return served.engine


def _scope(call: Call) -> dict[str, Any]:
    """One call as ASGI has it."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1", "method": call.method, "scheme": "http", "path": call.path,
        "raw_path": call.path.encode(), "query_string": call.query, "root_path": "",
        "headers": list(call.headers), "client": None, "server": None,
        "state": {"id": call.id},
    }  # fmt: skip


def check_versions(expected: Mapping[str, str], here: Mapping[str, str], name: str) -> None:
    """Raise ExecutionError where they differ, by name."""
    apart = [
        f"{what} is {here.get(what, 'not there')} and {expected.get(what, 'not there')} where the "
        "command runs"
        for what in sorted(expected.keys() | here.keys())
        if expected.get(what) != here.get(what)
    ]
    if apart:
        raise ExecutionError(f"{name} ({platform.node()}): {'; '.join(apart)}; install the same")
