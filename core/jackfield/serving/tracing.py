"""OpenTelemetry: a span for each request that is posted, where the environment asks for traces.

Its names are those of OpenTelemetry's semantic conventions for HTTP and for generative models; no
text of anybody's is in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("jackfield.serving")

Message = MutableMapping[str, Any]
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_GROUP = "opentelemetry_traces_exporter"


def exporters(environment: Mapping[str, str]) -> list[str]:
    """The exporters that the usual variables ask for, by the names of their entry points."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    by_itself = "otlp" if any(environment.get(name) for name in _ENDPOINTS) else ""
    asked = environment.get("OTEL_TRACES_EXPORTER", "").strip() or by_itself
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    names = [name.strip() for name in asked.split(",")]
    otlp = _PROTOCOLS.get(protocol, protocol)
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def traces() -> TracerProvider | None:
    """What the environment asks for. None: it asks for nothing, or for what is not installed, which
    a warning says.
    """
    names = exporters(os.environ)
    if not names:
        return None
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("no traces: OpenTelemetry is not here; pip install jackfield[otel]")
        return None
    provider = TracerProvider()
    for name in names:
        found = next(iter(entry_points(group=_GROUP, name=name)), None)
        if found is None:
            logger.warning("no traces to %s: no exporter of that name is installed", name)
            continue
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
    return provider


class Traced:
    """ASGI middleware: spans of `provider`, within the trace that a client's headers name."""

    def __init__(self, app: Callable[..., Awaitable[None]], provider: TracerProvider) -> None:
        self._app, self._tracer = app, provider.get_tracer("jackfield")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state, status = scope.setdefault("state", {}), 500
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        with self._tracer.start_as_current_span(
            "POST", TraceContextTextMapPropagator().extract(headers), SpanKind.SERVER,
            record_exception=False, set_status_on_exception=False,
        ) as span:  # fmt: skip
            try:
                await self._app(scope, receive, answer)
            finally:
                if (route := getattr(scope.get("route"), "path", None)) is not None:
                    span.update_name(f"POST {route}")
                    span.set_attribute("http.route", route)
                span.set_attributes(attributes(state, status))
                if status >= 500:
                    span.set_status(StatusCode.ERROR)


def attributes(state: Mapping[str, Any], status: int) -> dict[str, Any]:
    """What is told of a request, from what the guard and the run have left in its state."""
    said = state.get("said", {})
    usage = said.get("usage", {})
    found = {
        "http.request.method": "POST",
        "http.response.status_code": status,
        "jackfield.request.id": state.get("id"),
        "gen_ai.request.model": said.get("model"),
        "gen_ai.response.finish_reasons": said.get("finish"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "jackfield.time_to_first_token": said.get("first_token"),
    }
    return {name: value for name, value in found.items() if value is not None}
