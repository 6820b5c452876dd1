"""The models that a server may run: loaded when they are asked for, unloaded when they idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from jackfield.engine.engine import Engine
from jackfield.errors import JackfieldError, QueueFullError, UsageError, error_text, quoted
from jackfield.serving.errors import ApiError
from jackfield.serving.settings import ModelSettings, ServerSettings
from jackfield.serving.turns import format_for

logger = logging.getLogger("jackfield.serving")

Load = Callable[..., Engine]
State = Literal["cold", "loading", "ready", "failed"]
WATCH_EVERY = 0.5  # seconds between looks at engines that hang and at those that idle


class Served:
    """A model under the name that clients use, with the engine that runs it now, if one does.

    An engine whose step hangs is taken out, its requests end with the cause, and another one is
    loaded, `restarts` times in the life of the server. `failure` says why there is none.
    """

    def __init__(self, name: str, model: ModelSettings, settings: ServerSettings, load: Load):
        self.name = name
        self.created = int(time.time())
        self.engine: Engine | None = None
        self.state: State = "cold"
        self.failure: str | None = None
        self.in_use = 0
        self.restarts_left = settings.restarts
        self._idle_since = time.monotonic()
        self._load, self._model = load, model.model
        own = {"max_waiting": settings.max_waiting, "stall_after": settings.stall_after}
        self._arguments = {**own, **model.arguments}
        self._changing = asyncio.Lock()
        # Threads of its own: a load or a close that hangs must not keep prompts from being read.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jackfield-load")

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Engine]:
        """The engine, loaded now where there is none; it stays as long as somebody has it.

        Raises ApiError (503) where it cannot be loaded, or has been taken out too often.
        """
        self.in_use += 1
        try:
            yield await self._ready()
        finally:
            self.in_use -= 1
            self._idle_since = time.monotonic()

    async def _ready(self) -> Engine:
        if (engine := self.engine) is not None and not engine.closed:
            return engine
        async with self._changing:  # one loads, the others wait for it
            if self.engine is None or self.engine.closed:
                await self._start()
            assert self.engine is not None
            return self.engine

    async def _start(self) -> None:
        if self.restarts_left < 0:
            raise ApiError(503, f"{self.name}: {self.failure}", code="model_failed")
        self.state = "loading"
        try:
            self.engine = await self.in_thread(self._made)
        except Exception as error:
            self.state, self.failure = "failed", str(error)
            logger.error("cannot load %s: %s", self.name, error_text(error))
            if isinstance(error, JackfieldError):
                raise ApiError(503, f"{self.name}: {error}", code="model_failed") from error
            raise
        self.state, self.failure = "ready", None

    def _made(self) -> Engine:
        engine = self._load(self._model, **self._arguments)
        if getattr(engine.tokenizer, "chat_template", None):
            format_for(engine)  # renders the template some times, which no request is to wait for
        return engine

    async def in_thread(self, act: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    def cause(self, error: BaseException) -> BaseException:
        """What ended a request: what its engine was taken out for, if it was."""
        if isinstance(error, UsageError) and self.failure and not isinstance(error, QueueFullError):
            return ApiError(503, f"{self.name}: {self.failure}", code="engine_failed")
        return error

    async def look(self, timeout: float) -> None:
        """Take the engine out where it hangs, and where nobody has wanted it for `timeout` s."""
        engine = self.engine
        if engine is None or self._changing.locked():
            return
        health = engine.health()
        if health.stalled:
            await self._replace(engine, f"a step hangs in {health.inside or 'the model'}")
        elif timeout and not self.in_use and time.monotonic() - self._idle_since > timeout:
            async with self._changing:
                if not self.in_use:
                    logger.info("unloading %s, which idles", self.name)
                    self.engine, self.state = None, "cold"
                    await self.in_thread(engine.close)

    async def _replace(self, engine: Engine, why: str) -> None:
        logger.error("%s: %s; its requests end, and it is loaded again", self.name, why)
        async with self._changing:
            self.engine, self.state, self.failure = None, "failed", why
            self.restarts_left -= 1
            with contextlib.suppress(JackfieldError):  # which says again that it hangs
                await self.in_thread(engine.close)
            if self.restarts_left >= 0:
                with contextlib.suppress(ApiError):
                    await self._start()

    async def close(self) -> None:
        engine, self.engine, self.state = self.engine, None, "cold"
        if engine is not None:
            try:
                await self.in_thread(engine.close)
            except JackfieldError as error:
                logger.error("closing %s: %s", self.name, error)
        self._threads.shutdown(wait=False, cancel_futures=True)


class Pool:
    """All models of a server, by name. To be entered in the event loop that serves."""

    def __init__(self, settings: ServerSettings, load: Load) -> None:
        self._settings = settings
        self.models: Mapping[str, Served] = {
            name: Served(name, model, settings, load) for name, model in settings.models.items()
        }
        self._watching: asyncio.Task[None] | None = None

    def __getitem__(self, name: str) -> Served:
        """Raises ApiError (404) for a name that is not listed: nothing else is ever loaded."""
        if (served := self.models.get(name)) is None:
            raise ApiError(
                404,
                f"there is no model {quoted(name)} here; there are {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return served

    @property
    def unready(self) -> str | None:
        """Why the server takes no requests now; None: it does."""
        for served in self.models.values():
            if served.state in ("loading", "failed"):
                return f"{served.name}: {served.failure or 'is being loaded'}"
            if served.engine is not None and not (health := served.engine.health()).ready:
                why = f"a step hangs in {health.inside}" if health.stalled else "its queue is full"
                return f"{served.name}: {why}"
        return None

    async def __aenter__(self) -> Pool:
        self._watching = asyncio.create_task(self._watch(), name="jackfield-watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await asyncio.gather(*(served.close() for served in self.models.values()))

    async def _watch(self) -> None:
        # One model alone stays: there is nothing that its memory could be wanted for.
        timeout = self._settings.model_timeout if len(self.models) > 1 else 0.0
        while True:
            await asyncio.sleep(WATCH_EVERY)
            for served in self.models.values():
                try:
                    await served.look(timeout)
                except Exception as error:  # noqa: BLE001 - the others are still to be watched
                    logger.error("watching %s: %s", served.name, error_text(error))
