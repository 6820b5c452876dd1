"""Spans of requests: what is in them, what never is, and when there are any."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import served

from jackfield.serving import tracing
from jackfield.serving.app import create_app

OTEL = "needs jackfield[otel]"
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=OTEL)
export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=OTEL)
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=OTEL)

SECRET = "Sort these numbers: 41 7 88 23"
ANSWER = "7 23 41 88"
BODY = {"model": "demo", "messages": [{"role": "user", "content": SECRET}]}
SAMPLED = {"stream": True, "n": 2, "temperature": 1, "seed": 1, "max_completion_tokens": 3}
DOCS = Path(__file__).parents[2] / "docs/serving.md"


@pytest.fixture
def spans() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture
def traced(
    spans: Any, serve: Callable[..., served.Served], monkeypatch: pytest.MonkeyPatch
) -> served.Served:
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    made = functools.partial(create_app, tracing=lambda: provider)
    monkeypatch.setattr(served, "create_app", made)
    return serve(log_texts=True)


def test_a_span_has_figures_and_no_text(traced: served.Served, spans: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    url = f"{traced.url}/v1/chat/completions"
    whole = httpx.post(url, json=BODY, headers={"traceparent": parent})
    assert whole.json()["choices"][0]["message"]["content"] == ANSWER
    stream = httpx.post(url, json={**BODY, **SAMPLED})
    wrong = httpx.post(url, json={**BODY, SECRET: SECRET})
    httpx.post(f"{traced.url}/v1/nothing/{ANSWER}", json={})
    httpx.get(f"{traced.url}/v1/models")
    first, second, third, fourth = spans.get_finished_spans()

    own = dict(first.attributes)
    assert 0 < own.pop("jackfield.time_to_first_token") < 60
    assert own == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions",
        "http.response.status_code": 200, "jackfield.request.id": whole.headers["X-Request-ID"],
        "gen_ai.request.model": "demo", "gen_ai.usage.input_tokens": 18,
        "gen_ai.usage.output_tokens": 11, "gen_ai.response.finish_reasons": ("stop",),
    }  # fmt: skip
    assert first.name == "POST /v1/chat/completions"
    assert first.kind.name == "SERVER"
    assert f"{first.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{first.parent.span_id:016x}" == parent.split("-")[2]

    assert stream.text.endswith("data: [DONE]\n\n")
    assert second.attributes["gen_ai.usage.output_tokens"] == 6  # so it ended after the stream
    assert second.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert second.parent is None
    assert third.attributes["http.response.status_code"] == wrong.status_code == 400
    assert fourth.attributes["http.response.status_code"] == 404
    for span in spans.get_finished_spans():
        assert SECRET not in span.to_json()
        assert ANSWER not in span.to_json()
    told = DOCS.read_text().partition("## Traces\n")[2].partition("\n## ")[0]
    assert {name for name in first.attributes if f"`{name}`" not in told} == set()


def test_a_failure_is_one_of_the_span(traced: served.Served, spans: Any) -> None:
    (model,) = traced.pool.models.values()
    model.lease = None  # type: ignore[assignment,method-assign]
    assert httpx.post(f"{traced.url}/v1/chat/completions", json=BODY).status_code == 500
    (span,) = spans.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert not span.events


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x"}, []),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["console"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, []),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ["otlp_proto_grpc"],
        ),
    ],
)
def test_the_environment_asks(environment: dict[str, str], found: list[str]) -> None:
    assert tracing.exporters(environment) == found


def test_the_exporter_that_is_asked_for_takes_spans() -> None:
    code = """
from jackfield.serving import tracing
provider = tracing.traces()
provider.get_tracer("x").start_span("of a test").end()
provider.shutdown()
"""
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "console"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert '"name": "of a test"' in done.stdout, done.stderr


def test_what_is_not_installed_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with caplog.at_level(logging.WARNING):
        provider = tracing.traces()
        assert provider is not None
        provider.shutdown()
        assert "no traces to carrier-pigeon" in caplog.text
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        assert tracing.traces() is None
        assert "pip install jackfield[otel]" in caplog.text
