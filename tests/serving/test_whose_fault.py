"""What goes wrong is answered as whoever brought it on must hear it: 4xx, or 500 and 503."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from served import Served, serving
from test_behaviour import ask, body, error_of, events

import jackfield.errors
from jackfield.errors import JackfieldError
from jackfield.requests import text_errors
from jackfield.serving.errors import ApiError, as_api_error, broken, of_text
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.schema.responses import ResponsesRequest

#: error -> the status where the engine raises it when it is asked, and where a step does
STATUS = {
    "CacheFullError": (400, 500),
    "CheckpointError": (500, 500),
    "ExecutionError": (500, 500),
    "JackfieldError": (500, 500),
    "OptionError": (500, 500),
    "PlanError": (500, 500),
    "PluginError": (500, 500),
    "PromptError": (400, 500),
    "QueueFullError": (429, 500),
    "RanksError": (500, 500),
    "SelectionError": (500, 500),
    "SettingsError": (400, 500),
    "UsageError": (503, 503),  # the engine is closed
}


def test_every_error_of_the_engine_has_a_status() -> None:
    found = {name: getattr(jackfield.errors, name) for name in jackfield.errors.__all__}
    kinds = {
        n: e for n, e in found.items() if isinstance(e, type) and issubclass(e, JackfieldError)
    }
    assert set(kinds) == set(STATUS)
    for name, kind in kinds.items():
        asked = as_api_error(kind("too warm"), "small", ChatRequest.NAMES, "messages")
        stepped = broken(kind("too warm"), "small")
        assert (asked.status, stepped.status) == STATUS[name], name
        for error in (asked, stepped):
            assert error.message == ("small: " * (error.status >= 500)) + "too warm"
    for error in (
        as_api_error(OSError("disk"), "small", {}, "prompt"),
        broken(OSError("disk"), "m"),
    ):
        assert error.status == 500
        assert "OSError: disk" in error.message


FOLLOW = text_errors.failed("structure", "it costs too much")
#: how a text ended, what its request has given -> the status and the field
ENDED = {
    (text_errors.NOT_NUMBERS, "regex"): (500, None),
    (text_errors.failed("text", "ValueError: no"), "regex"): (500, None),
    (text_errors.failed("logits_processor", "ValueError: no"), "regex"): (500, None),
    ("scheduler 'fifo' passed it over 9 times in a row", "regex"): (500, None),
    (text_errors.FORBIDDEN, ""): (500, None),
    (text_errors.FORBIDDEN, "seed"): (500, None),
    (text_errors.FORBIDDEN, "seed logit_bias"): (400, "logit_bias"),
    (text_errors.FORBIDDEN, "logit_bias choices"): (400, "choices"),
    (FOLLOW, "response_format"): (400, "response_format"),
    (FOLLOW, "tools"): (400, "tools"),
    (FOLLOW, "text"): (400, "text"),
    (text_errors.complete_too_soon(3, 5), "grammar"): (400, "grammar"),
    (text_errors.too_few_texts(1, 2), "n"): (400, "n"),
}


@pytest.mark.parametrize(("error", "given"), ENDED)
def test_a_text_that_ends_by_an_error_is_told_to_whom_it_concerns(error: str, given: str) -> None:
    found = of_text(error, "small", ChatRequest.NAMES, given.split())
    assert (found.status, found.param) == ENDED[error, given]
    assert found.message == ("small: " * (found.status == 500)) + error


def test_fields_that_confine_are_fields() -> None:
    from jackfield.serving.errors import _CONFINING

    bodies = (ChatRequest, CompletionRequest, ResponsesRequest)
    assert all(any(name in kind.model_fields for kind in bodies) for name in _CONFINING)
    structures = {"response_format", "text", "regex", "grammar", "choices", "tools", "logit_bias"}
    assert structures <= set(_CONFINING)


@pytest.fixture(scope="module")
def broken_model() -> Iterator[Served]:
    """One whose logits are no numbers."""
    with serving() as served:
        model = served.engine.model
        model.lm_head.register_forward_hook(lambda _, given, out: out * float("nan"))
        yield served


def whole(served: Served, path: str, **more: Any) -> dict[str, Any]:
    answer = httpx.post(served.url + path, json={"model": "demo", **more}, timeout=60)
    assert answer.status_code == 500
    return error_of(answer)


SAY = [{"role": "user", "content": "Tell me"}]


def test_logits_that_are_no_numbers_are_the_fault_of_the_server(broken_model: Served) -> None:
    for error in (
        error_of(ask(broken_model)),
        whole(broken_model, "/v1/chat/completions", messages=SAY),
        whole(broken_model, "/v1/responses", input="Tell me"),
        whole(broken_model, "/v1/completions", prompt="Tell me", n=2, temperature=1),
        events(httpx.post(f"{broken_model.url}/v1/completions", json=body(stream=True)))[-1][
            "error"
        ],
    ):
        assert error == {
            "message": "demo: no token can be chosen: the logits are not numbers",
            "type": "server_error", "param": None, "code": "engine_failed",
        }  # fmt: skip


def test_a_response_that_fails_so_says_so(broken_model: Served) -> None:
    asked = {"model": "demo", "input": "Tell me", "stream": True}
    answer = httpx.post(f"{broken_model.url}/v1/responses", json=asked, timeout=60)
    last = [line for line in answer.text.split("\n") if line.startswith("data: ")][-1]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["code"] == "server_error"


def test_errors_of_ours_stay_as_they_are() -> None:
    own = ApiError(503, "small: hangs", code="engine_failed")
    again: list[Callable[[], ApiError]] = [
        lambda: broken(own, "small"),
        lambda: as_api_error(own, "small", {}, "prompt"),
    ]
    assert all(act() is own for act in again)
