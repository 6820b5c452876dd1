"""The models that a server may run: loaded when they are asked for, unloaded when they idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jackfield.engine.engine import Engine
from jackfield.errors import JackfieldError, QueueFullError, UsageError, error_text, quoted
from jackfield.serving.errors import ApiError
from jackfield.serving.own_settings import check_own_settings
from jackfield.serving.settings import ModelSettings, ServerSettings
from jackfield.serving.turns import defaults

logger = logging.getLogger("jackfield.serving")

Load = Callable[..., Engine]
State = Literal["cold", "loading", "ready", "failed"]
RETRY_LOAD = 10.0  # seconds after which a model that could not be loaded is tried again
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
        self._settings = settings
        self._hung = False
        self._failed_at = 0.0
        self._closed = False
        self._idle_since = time.monotonic()
        self._load, self.source = load, model.model
        own = {"max_waiting": settings.max_waiting, "stall_after": settings.stall_after}
        self._arguments = {**own, **model.arguments}
        #: What changes the engine now. A task of its own, which goes on when who began it leaves.
        self._changing: asyncio.Task[None] | None = None
        self._causes: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()
        # Threads of its own: a load or a close that hangs must not keep prompts from being read.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jackfield-load")

    @property
    def adapters(self) -> Collection[str]:
        """The names of those that it was told to load with."""
        named = self._arguments.get("adapters")
        return named.keys() if isinstance(named, Mapping) else ()

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

    async def preload(self) -> Engine:
        """Load it before anybody asks. Raises what `jackfield.load` raises."""
        self.engine = await self.in_thread(self._made)
        self.state = "ready"
        return self.engine

    async def _ready(self) -> Engine:
        while (engine := self.engine) is None or engine.closed:
            if self._changing is None:
                self._check_failures()
                self._change(self._start() if engine is None else self._replace_lost(engine))
            assert self._changing is not None
            await asyncio.shield(self._changing)
        return engine

    def _check_failures(self) -> None:
        """Raise ApiError where another attempt has no hope, or comes too soon after one."""
        wait = RETRY_LOAD - (time.monotonic() - self._failed_at)
        if self.restarts_left < 0 or (self.state == "failed" and wait > 0):
            raise self._unavailable(max(wait, 1.0))

    def _unavailable(self, retry_after: float) -> ApiError:
        return ApiError(
            503, f"{self.name}: {self.failure}", code="model_failed", retry_after=retry_after
        )

    def _change(self, act: Coroutine[Any, Any, None]) -> None:
        def changed(task: asyncio.Task[None]) -> None:
            self._changing = None
            if not task.cancelled():
                task.exception()  # is raised to those who wait, if there are any

        self._changing = asyncio.create_task(act, name=f"jackfield-change-{self.name}")
        self._changing.add_done_callback(changed)

    async def _start(self) -> None:
        self.state = "loading"
        try:
            self.engine = await self.in_thread(self._made)
        except Exception as error:
            known = isinstance(error, JackfieldError)
            self.state, self.failure = "failed", str(error) if known else error_text(error)
            self._failed_at = time.monotonic()
            logger.error("cannot load %s: %s", self.name, self.failure)
            raise self._unavailable(RETRY_LOAD) from error
        self.state, self.failure, self._hung = "ready", None, False

    def _made(self) -> Engine:
        engine = self._load(self.source, **self._arguments)
        if self._closed:  # while it was loaded
            engine.close()
            return engine
        try:
            if engine.tokenizer is None:
                raise UsageError(
                    f"{self.name} has no tokenizer, and a server answers with text: "
                    "in Python jackfield.load(MODEL, tokenizer='FOLDER') gives it one"
                )
            check_own_settings(engine, self.name)
        except UsageError:
            engine.close()
            raise
        if getattr(engine.tokenizer, "chat_template", None):
            form = engine.chat_format  # renders the template, which no request is to wait for
            read = [defaults(self._settings, form, tools=tools)[1] for tools in (False, True)]
            if ignored := [name for name in read[0] if name in read[1]]:
                logger.warning(
                    "%s: its chat template reads nothing of %s", self.name, ", ".join(ignored)
                )
        return engine

    async def in_thread(self, act: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    def cause(self, engine: Engine, error: BaseException) -> BaseException:
        """What ended a request: what its engine was taken out for, if it was."""
        why = self._causes.get(engine)
        if why and isinstance(error, UsageError) and not isinstance(error, QueueFullError):
            return ApiError(503, f"{self.name}: {why}", code="engine_failed")
        return error

    @property
    def unready(self) -> str | None:
        """Why it takes no requests, though it has been asked to; None: it does, or will load."""
        if (engine := self.engine) is None or engine.closed:
            broken = self.state in ("loading", "failed")
            return f"{self.name}: {self.failure or 'is being loaded'}" if broken else None
        health = engine.health()
        if health.ready:
            return None
        why = f"a step hangs in {health.inside}" if health.stalled else "its queue is full"
        return f"{self.name}: {why}"

    @property
    def elsewhere(self) -> bool:
        """Whether what keeps it from taking requests bears on it alone, and not on the server:
        it is loaded, or cannot be.
        """
        return not self._hung and self.engine is None

    def look(self, timeout: float) -> None:
        """Take the engine out where it hangs, and where nobody has wanted it for `timeout` s."""
        engine = self.engine
        if engine is None or self._changing is not None:
            return
        health = engine.health()
        if engine.closed:
            self._change(self._replace_lost(engine))
        elif health.stalled:
            self._change(self._replace(engine, f"a step hangs in {health.inside or 'the model'}"))
        elif timeout and not self.in_use and time.monotonic() - self._idle_since > timeout:
            logger.info("unloading %s, which idles", self.name)
            self.engine, self.state = None, "cold"
            self._change(self._stop(engine))

    async def _replace_lost(self, engine: Engine) -> None:
        """One that has closed itself: of the processes that shared its model, one has ended."""
        await self._replace(engine, engine.health().failure or "it was closed")

    async def _replace(self, engine: Engine, why: str) -> None:
        logger.error("%s: %s; its requests end, and it is loaded again", self.name, why)
        self._causes[engine] = why
        self.engine, self.state, self.failure, self._hung = None, "failed", why, True
        self.restarts_left -= 1
        await self._stop(engine)  # says again that it hangs
        if self.restarts_left >= 0:
            await self._start()

    async def _stop(self, engine: Engine) -> None:
        try:
            await self.in_thread(engine.close)
        except Exception as error:  # noqa: BLE001 - of plugins; the engine is given up all the same
            logger.error("closing %s: %s", self.name, error_text(error))

    async def close(self) -> None:
        self._closed = True
        if self._changing is not None:
            self._changing.cancel()
        engine, self.engine, self.state = self.engine, None, "cold"
        if engine is not None:
            await self._stop(engine)
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
        """By its name, or by what it was loaded from, as it was written there.

        Raises ApiError (404) for what is not listed: nothing else is ever loaded.
        """
        by_source = (s for s in self.models.values() if s.source == name)
        if (served := self.models.get(name) or next(by_source, None)) is None:
            named = f"there are {', '.join(self.models)}"
            with_it = (one for one, s in self.models.items() if name in s.adapters)
            if (model := next(with_it, None)) is not None:
                named = f"it is an adapter: write model {model!r} and adapter {name!r}"
            raise ApiError(
                404,
                f"there is no model {quoted(name)} here; {named}",
                param="model",
                code="model_not_found",
            )
        return served

    @property
    def unready(self) -> str | None:
        """Why the server takes no requests now; None: it does."""
        found = [(served, why) for served in self.models.values() if (why := served.unready)]
        others = any(served.state == "ready" for served in self.models.values())
        return next((why for served, why in found if not (others and served.elsewhere)), None)

    @property
    def lost(self) -> str | None:
        """Why an engine is out of service for good, and its model with it; None: none is."""
        found = (s for s in self.models.values() if s.restarts_left < 0)
        return next((f"{served.name}: {served.failure}" for served in found), None)

    async def preload(self, say: Callable[[str], None]) -> None:
        """Load all models before anybody asks; `say` is told their plans.

        Raises what `jackfield.load` raises.
        """
        for served in self.models.values():
            engine = await served.preload()
            say(engine.explain())
            if sizes := await served.in_thread(partial(engine.compile_ahead, prompts=True)):
                say(f"{served.name}: steps of {', '.join(map(str, sizes))} tokens are compiled")

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
                    served.look(timeout)
                except Exception as error:  # noqa: BLE001 - the others are still to be watched
                    logger.error("watching %s: %s", served.name, error_text(error))
