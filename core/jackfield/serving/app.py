"""The application: endpoints over a pool of engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import jackfield.api
from jackfield.serving.asking import Asking
from jackfield.serving.chat import Chat
from jackfield.serving.completions import TextCompletion
from jackfield.serving.errors import ApiError, of_validation
from jackfield.serving.events import Events, stream, unless_gone
from jackfield.serving.guards import Guard
from jackfield.serving.keys import Keys
from jackfield.serving.metrics import CONTENT_TYPE, Engines, Metrics
from jackfield.serving.pool import Load, Pool
from jackfield.serving.runs import Run
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.settings import ServerSettings


def create_app(settings: ServerSettings, load: Load = jackfield.api.load) -> FastAPI:
    """The ASGI application of a server; `load` makes the engines.

    Its lifespan opens the pool, and closes every engine at its end.
    """
    pool, metrics = Pool(settings, load), Metrics()
    metrics.registry.register(Engines(pool))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(
        title="jackfield", lifespan=lifespan, docs_url=None, redoc_url=None,
        description="OpenAI's protocol over any transformers model and any plugged backend.",
    )  # fmt: skip
    app.state.pool, app.state.metrics, app.state.settings = pool, metrics, settings
    _add_health(app, pool, metrics)
    _add_models(app, pool)
    _add_completions(app, pool, metrics, settings)
    _add_errors(app)
    app.add_middleware(Guard, settings=settings, keys=Keys(settings.keys))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
        )  # fmt: skip
    return app


def _add_health(app: FastAPI, pool: Pool, metrics: Metrics) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """The server answers."""
        return {"status": "alive"}

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
            "id": name, "object": "model", "created": served.created, "owned_by": "jackfield",
            "state": served.state,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that may be asked for."""
        return {"object": "list", "data": [shown(name) for name in pool.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return shown(name)

    def engines(model: str | None) -> dict[str, Any]:
        chosen = pool.models if model is None else {model: pool[model]}
        return {name: served.engine for name, served in chosen.items() if served.engine}

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


def _add_completions(app: FastAPI, pool: Pool, metrics: Metrics, settings: ServerSettings) -> None:
    async def answered(request: Request, body: Any, kind: Any, prompt: str) -> Response:
        request.state.said = {"model": body.model, "user": body.user}
        run = Run(pool[body.model], metrics, body.NAMES, prompt)
        try:
            engine = await run.open()
            answer = kind(body, Asking(settings, request.state.owner), engine)
            await run.start(engine, answer.prompts, answer.asked(), settings.max_samples)
        except BaseException:
            await run.close()
            raise
        if body.stream:
            return Events(run, stream(answer.chunks(run)))
        found = await unless_gone(request, run, lambda: answer.whole(run))
        request.state.said["usage"] = found and found["usage"]
        return JSONResponse(found)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Go on with a conversation."""
        return await answered(request, body, Chat, "messages")

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Go on with a text."""
        return await answered(request, body, TextCompletion, "prompt")


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
        if error.status_code == 405:
            return answer(ApiError(405, f"{where}: this path is not for {request.method}"))
        if error.status_code == 404:
            return answer(ApiError(404, f"there is nothing at {where}", code="not_found"))
        return answer(ApiError(error.status_code, str(error.detail)))
