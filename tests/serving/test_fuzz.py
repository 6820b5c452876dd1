"""Bodies of every kind, from the published OpenAPI document and beyond it: no 5xx, no hang, an
error names its field. `test_ten_thousand_bodies` is the long one.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_values import json_values
from served import Served, serving

schemathesis = pytest.importorskip("schemathesis", reason="needs jackfield[dev]")
# which schemathesis needs for a document
pytest.importorskip("werkzeug", reason="needs jackfield[dev]")

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 3  # tokens of an answer
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SAY = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": SAY},
    "/v1/completions": {"model": "demo", "prompt": "One"},
    "/v1/responses": {"model": "demo", "input": "hi", "store": False},
}
JSON = json_values(st.text(max_size=20), 4, 8)
ODD = st.sampled_from([
    -1, 0, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -0.0, 1e-320, "", "\0", "\n",
    "a" * 3000, "\U0001f600", "../../etc/passwd", "http://127.0.0.1:1/x",
    "file:///etc/passwd", "plugin:sample",
    "{{ 7 * 7 }}", "(a+)+$", "[", "root ::= ", [], {}, [[]], [None], [[0]], {"": None},
    {"type": "object"}, {"type": "json_schema"}, {"$ref": "http://127.0.0.1:1/x"}, True, False,
])  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(max_completion_tokens=MOST, stall_after=10, restarts=0) as found:
        yield found


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=20) as made:
        yield made


def document(client: httpx.Client) -> Any:
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


def few(body: Any) -> Any:
    """The body, with few tokens where it asks for many."""
    if isinstance(body, dict):
        body = dict(body)
        for name in LIMITS:
            if isinstance(body.get(name), int | float) and body[name] > MOST:
                body[name] = MOST
    return body


def check(client: httpx.Client, path: str, body: Any) -> tuple[int, str | None]:
    """Ask; the status, and what the error is about."""
    sent = json.dumps(few(body), ensure_ascii=True)
    answer = client.post(path, content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (answer.text, sent[:500])
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert "server_error" not in answer.text, sent[:500]
            assert path == "/v1/responses" or answer.text.endswith("data: [DONE]\n\n")
        return 200, None
    found = answer.json()
    assert set(found) == {"error"}
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert 0 < len(error["message"]) < 2000
    return answer.status_code, error["param"]


def fuzzed(client: httpx.Client, path: str, mode: str, count: int) -> Counter[int]:
    """Bodies that the document allows, or not."""
    seen: Counter[int] = Counter()
    kind = getattr(schemathesis.GenerationMode, mode)

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(document(client)[path]["POST"].as_strategy(generation_mode=kind))
    def run(case: Any) -> None:
        if not isinstance(case.body, dict | list | str | int | float | bool | None):
            return  # no body at all, or bytes, which tests/serving/test_bodies.py sends
        body = few(case.body)
        if isinstance(body, dict) and mode == "POSITIVE":
            body["model"] = "demo"
        status, param = check(client, path, body)
        seen[status] += 1
        if status == 400 and isinstance(body, dict):
            assert param, body

    run()
    return seen


def mutated(client: httpx.Client, path: str, count: int) -> Counter[int]:
    """A body that is right, but for one field of those in the document: if any, that is named."""
    schema = client.get("/openapi.json").json()
    ref = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = sorted(schema["components"]["schemas"][ref["$ref"].rsplit("/", 1)[-1]]["properties"])
    seen: Counter[int] = Counter()

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(fields), ODD | JSON)
    def run(field: str, value: Any) -> None:
        status, param = check(client, path, {**BASES[path], field: value})
        seen[status] += 1
        if status != 200:
            assert param, (field, value)
            assert param.partition(".")[0] in (field, *PARTNERS.get(field, ())), (field, value)

    run()
    return seen


#: Fields whose values are wrong beside the value of another one, which is named.
PARTNERS: dict[str, tuple[str, ...]] = {
    "n": ("prompt", "best_of"), "best_of": ("n",), "stream": ("stream_options",),
    "messages": ("max_completion_tokens", "max_tokens"), "input": ("max_output_tokens",),
    "prompt": ("max_tokens",), "add_generation_prompt": ("continue_final_message",),
    "continue_final_message": ("messages", "add_generation_prompt"),
    "instructions": ("input", "max_output_tokens"),
    "tools": ("tool_choice",), "documents": ("messages",),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_is_wrong_is_named(client: httpx.Client, path: str) -> None:
    assert {200, 400} <= set(mutated(client, path, 40))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.one_in(4)
def test_bodies_of_the_document(client: httpx.Client, path: str, mode: str) -> None:
    assert sum(fuzzed(client, path, mode, 12).values()) > 3


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_bodies(client: httpx.Client, small: Served) -> None:
    seen: Counter[int] = Counter()
    for path in PATHS:
        seen += mutated(client, path, 1800)
        for mode in ("POSITIVE", "NEGATIVE"):
            seen += fuzzed(client, path, mode, 900)
    assert seen.total() >= 10_000
    health = small.engine.health()
    assert health.ready
    statistics = small.engine.statistics()
    assert statistics.running == statistics.waiting == 0
