"""The application: endpoints over a pool of engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import jackfield.api
from jackfield.serving.answering import Answering, Exchange
from jackfield.serving.asking import Asking
from jackfield.serving.elsewhere import elsewhere_here
from jackfield.serving.errors import ApiError, of_validation, refused
from jackfield.serving.events import Events, unless_gone
from jackfield.serving.guards import Guard
from jackfield.serving.keys import Keys
from jackfield.serving.metrics import CONTENT_TYPE, Engines, Metrics
from jackfield.serving.page import add_page
from jackfield.serving.pool import Load, Pool
from jackfield.serving.responses import listed, retrieved
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.common import Sampling
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.schema.responses import (
    ItemsQuery,
    ResponsesRequest,
    RetrieveQuery,
)
from jackfield.serving.settings import ServerSettings
from jackfield.serving.store import Store
from jackfield.serving.tracing import Traced, traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Q = TypeVar("Q", bound=BaseModel)


GONE = Response(status_code=499)  # which nobody reads


def create_app(
    settings: ServerSettings,
    load: Load = jackfield.api.load,
    tracing: Callable[[], TracerProvider | None] = traces,
) -> FastAPI:
    """The ASGI application of a server; `load` makes the engines, `tracing` what takes spans.

    Its lifespan opens the pool, and closes every engine at its end.
    """
    made, provider = Answering(settings, load), tracing()
    pool, metrics = made.pool, made.metrics
    metrics.registry.register(Engines(pool))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)  # sends what is left

    app = FastAPI(
        title="jackfield", lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
        description="OpenAI's protocol over any transformers model and any plugged backend.",
    )  # fmt: skip
    app.state.pool, app.state.metrics, app.state.settings = pool, metrics, settings
    app.state.answering = made
    _add_health(app, pool, metrics)
    _add_models(app, pool)
    _add_completions(app, made)
    if settings.page:
        add_page(app)
    _add_errors(app)
    app.add_middleware(Guard, settings=settings, keys=Keys(settings.keys), metrics=metrics)
    if provider is not None:
        app.add_middleware(Traced, provider=provider)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **of_sites(settings))
    return app


def of_sites(settings: ServerSettings) -> dict[str, Any]:
    """Arguments of CORSMiddleware."""
    return {
        "allow_origins": settings.cors_origins, "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],  # the client for browsers has headers of its own
    }  # fmt: skip


def _add_health(app: FastAPI, pool: Pool, metrics: Metrics) -> None:
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """The server answers."""
        return {"status": "alive"}

    @app.head("/health", include_in_schema=False)
    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        """Whether requests are taken: 200, or 503 with the reason."""
        why = pool.unready
        status = {"status": "ready"} if why is None else {"status": "not ready", "reason": why}
        return JSONResponse(status, 200 if why is None else 503)

    @app.get("/metrics")
    async def counted() -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(metrics.show(), headers={"Content-Type": CONTENT_TYPE})


def _add_models(app: FastAPI, pool: Pool) -> None:
    def shown(name: str) -> dict[str, Any]:
        served = pool[name]
        return {
            "id": served.name, "object": "model", "created": served.created,
            "owned_by": "jackfield", "state": served.state,
        }  # fmt: skip

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that may be asked for."""
        return {"object": "list", "data": [shown(name) for name in pool.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return shown(name)

    def engines(model: str | None) -> dict[str, Any]:
        chosen = pool.models.values() if model is None else [pool[model]]
        return {served.name: served.engine for served in chosen if served.engine}

    @app.get("/v1/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        """What each model that is loaded runs with, and why the rest was passed over."""
        return {
            name: {**engine.plan.to_dict(), "explained": engine.explain()}
            for name, engine in engines(model).items()
        }

    @app.get("/v1/report")
    async def report(model: str | None = None) -> dict[str, Any]:
        """What was observed to run since each model was loaded, and what it is doing now."""
        return {
            name: {
                "report": engine.report().to_dict(), "statistics": engine.statistics().to_dict(),
                "health": engine.health().to_dict(),
            }
            for name, engine in engines(model).items()
        }  # fmt: skip


def _add_completions(app: FastAPI, made: Answering) -> None:
    async def answered(request: Request, body: Sampling) -> Response:
        said = request.state.said = {}
        asking = Asking(made.settings, request.state.owner, request.state.id)
        exchange = Exchange(request.scope["route"].path, body, asking, said, made)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(exchange.close)
            if (answer := await unless_gone(request, exchange.start())) is None:
                return GONE
            if body.stream:
                stack.pop_all()  # which closes it itself
                return Events(exchange.run, exchange.events(answer))
            found = await unless_gone(request, answer.whole(exchange.run))
            return GONE if found is None else JSONResponse(found)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Go on with a conversation."""
        return await answered(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Go on with a text."""
        return await answered(request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Go on with a conversation, told as items."""
        return await answered(request, body)

    _add_stored(app, made.store)


def _add_stored(app: FastAPI, store: Store) -> None:
    path = "/v1/responses/{response_id}"

    @app.get(path)
    async def response(request: Request, response_id: str) -> dict[str, Any]:
        """A response that is stored."""
        asked = query(request, RetrieveQuery)
        return retrieved(store.get(request.state.owner, response_id), asked)

    @app.get(f"{path}/input_items")
    async def input_items(request: Request, response_id: str) -> dict[str, Any]:
        """What it answers."""
        asked = query(request, ItemsQuery)
        return listed(store.get(request.state.owner, response_id), asked)

    @app.post(f"{path}/cancel")
    async def cancel(request: Request, response_id: str) -> None:
        """Refused: no response is made in the background."""
        store.get(request.state.owner, response_id)
        raise refused(
            "only a response that is made in the background can be cancelled, and this one is "
            "whole; hang up to end one while it is streamed", "response_id",
        )  # fmt: skip

    @app.delete(path)
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Forget it."""
        store.delete(request.state.owner, response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def query(request: Request, kind: type[Q]) -> Q:
    """What stands behind the path. Raises ApiError."""
    asked: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name.removesuffix("[]") == "include":  # a list, however the client writes lists
            asked.setdefault("include", []).append(value)
        else:
            asked[name] = value
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise of_validation(error.errors()) from None


def _add_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def unlike_the_schema(request: Request, error: RequestValidationError) -> Response:
        return answer(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if (instead := elsewhere_here(request.method, request.url.path)) is not None:
            return answer(
                ApiError(404, f"there is nothing at {where}; {instead}", code="not_found")
            )
        if error.status_code == 405:
            return answer(ApiError(405, f"{where}: this path is not for {request.method}"))
        if error.status_code == 404:
            return answer(ApiError(404, f"there is nothing at {where}", code="not_found"))
        return answer(ApiError(error.status_code, str(error.detail)))
