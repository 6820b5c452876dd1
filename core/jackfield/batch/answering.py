"""Who answers the lines of a job: an engine of this process, or replicas elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from jackfield.batch.lines import Json, Line
from jackfield.engine.engine import Engine
from jackfield.engine.report import Report
from jackfield.planning.planning import Plan
from jackfield.serving.answering import ENDPOINTS, Answering, Exchange
from jackfield.serving.asking import Asking
from jackfield.serving.errors import of_validation, refused, told
from jackfield.serving.settings import ServerSettings


@dataclass(frozen=True)
class Ran:
    """What answers: its plan, and what else they depend on."""

    plan: Plan
    more: Mapping[str, Any]


class Answerer(Protocol):
    """Answers lines, while it is open."""

    def open(self) -> AbstractAsyncContextManager[Ran]:
        """What answers. Raises what `jackfield.load` raises."""
        ...

    async def answer(self, line: Line, name: str, began: int) -> Json:
        """The body of the answer to the request `name` of a job that began then.

        Raises ApiError.
        """
        ...

    async def report(self) -> Report:
        """What was observed to run."""
        ...


class Here:
    """An engine of this process, of the one model of `settings`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._made = Answering(settings)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ran]:
        async with self._made.pool:
            (served,) = self._made.pool.models.values()
            self._engine = await served.preload()
            yield ran(self._engine, self._made.settings)

    async def answer(self, line: Line, name: str, began: int) -> Json:
        return await answer_to(line, name, began, self._made)

    async def report(self) -> Report:
        return self._engine.report()


def ran(engine: Engine, settings: ServerSettings) -> Ran:
    """What the answers of the one model of `settings` depend on beside what a lock has."""
    needs, config = engine.plan.requirements, engine.model.config
    (model,) = settings.models.values()
    # what is the same to the last bit is so for one number of threads
    deterministic = model.arguments.get("deterministic")
    threads = {"threads": torch.get_num_threads()} if deterministic else {}
    return Ran(engine.plan, {
        "dtype": needs.dtype, "device": needs.device,
        "commit": getattr(config, "_commit_hash", None), **threads,
    })  # fmt: skip


async def answer_to(line: Line, name: str, began: int, made: Answering) -> Json:
    """The body of the answer. Raises ApiError."""
    asking = Asking(made.settings, "", name, lambda: began)
    try:
        body = ENDPOINTS[line.url].schema.model_validate(line.body)
        if body.stream:
            raise refused("stream: a batch has no streams; leave it out", "stream")
        exchange = Exchange(line.url, body, asking, {}, made)
        try:
            answer = await exchange.start()
            return await answer.whole(exchange.run)
        finally:
            await exchange.close()
    except ValidationError as error:
        raise of_validation(error.errors()) from None
    except Exception as error:
        raise told(error) from error
