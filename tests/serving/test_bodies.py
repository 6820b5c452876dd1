"""Bodies and connections that are no good: OpenAI's error shape, the right status, in time."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Served, serving

from jackfield.serving.errors import ApiError
from jackfield.serving.json_bodies import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JSON = {"Content-Type": "application/json"}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
CHAT = "/v1/chat/completions"
SAY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def short() -> Iterator[Served]:
    """A server with little patience and room; nothing is loaded."""
    with serving(receive_timeout=0.4, max_connections=20, max_body=10_000, preload=False) as found:
        yield found


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found = answer.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in found["error"]["message"]
    assert len(found["error"]["message"]) < 1000
    error: dict[str, Any] = found["error"]
    return error


NO_JSON: dict[str, tuple[bytes, str, str | None]] = {
    "broken": (b'{"model"', "is not JSON", None),
    "nothing": (b"", "there is no body", None),
    "white space": (b" ", "is not JSON", None),
    "not utf-8": (b'{"model": "\xff"}', "is not UTF-8", None),
    "utf-16": ('{"model": "demo"}'.encode("utf-16"), "is not UTF-8", None),
    "NaN": (b'{"temperature": NaN}', "NaN", None),
    "infinite": (b'{"temperature": -Infinity}', "Infinity", None),
    "too large": (b'{"temperature": 1e999}', "too large", None),
    "digits": (b'{"seed": ' + b"9" * 5000 + b"}", "is not JSON", None),
    "twice": (b'{"model": "a", "model": "b"}', "twice", "model"),
    "deep": (b"[" * 100_000, "nested", None),
    "deep objects": (b'{"a":' * 70 + b"1" + b"}" * 70, "nested", None),
    "half": (
        json.dumps({"messages": [{"role": "user", "content": "a\ud83d"}]}).encode(),
        "half of a character", "messages.0.content",
    ),
    "half a name": (b'{"user": {"\\udc00": 1}}', "half of a character", "user"),
    "a list": (b"[]", "dictionary", None),
    "null": (b"null", "dictionary", None),
}  # fmt: skip


@pytest.mark.parametrize("why", NO_JSON)
def test_what_is_no_good_json_is_400(server: Served, why: str) -> None:
    body, said, param = NO_JSON[why]
    answer = httpx.post(server.url + CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    error = error_of(answer)
    assert said in error["message"]
    assert error["param"] == param


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_all_other_json_is_read(value: Any) -> None:
    infinite = "Infinity" in json.dumps(value).replace('"', "")
    for ascii_only in (True, False):
        try:
            text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
        except ValueError:
            assert infinite
            return
        read_json(text.encode(), 64)


@given(st.text(st.sampled_from('[]{}",:\\ a1'), max_size=30).map(str.encode))
def test_the_check_refuses_what_json_refuses(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        json.loads(body)
        with contextlib.suppress(ApiError):
            read_json(body, 64)
        return
    with pytest.raises(ApiError):
        read_json(body, 64)


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        *((method, CHAT, 405, None) for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
        ("GET", "/nothing", 404, None), ("GET", "/metrics/", 404, None),
        ("GET", "/v1/models/%ff%00..", 404, "model"), ("GET", "/v1/plan?model=x", 404, "model"),
        ("GET", "//v1/models", 404, None), ("GET", "/v1/../v1/models/x", 404, "model"),
    ],
)  # fmt: skip
def test_errors_of_paths(
    server: Served, method: str, path: str, status: int, param: str | None
) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"{}", 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"{}", 415),
        ({}, b"{}", 415),
        ({**JSON, "Content-Encoding": "gzip"}, b"\x1f\x8b", 415),
        (JSON, b" " * 10_001, 413),
        ({**JSON, "Host": "evil.example"}, b"{}", 400),
    ],
)
def test_errors_of_headers(
    short: Served, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = httpx.post(short.url + CHAT, content=body, headers=headers)
    assert answer.status_code == status
    error_of(answer)


def spoken(served: Served, data: bytes, within: float = 5.0) -> bytes:
    """What comes back until the server hangs up."""
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port or 0), timeout=within) as made:
        found = b""
        with contextlib.suppress(ConnectionError):
            made.sendall(data)
            while got := made.recv(65536):
                found += got
        return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Content-Length: 100\r\n\r\n{}", 408),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", 408),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: -2\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: yyyyyyyyyyyyyyyy\r\n" * 100_000, 431),
        (b"GET /" + b"x" * 300_000, 431),
        (b"\x16\x03\x01\x02\x00", 400),
        (HEAD, None), (b"", None), (b"GET", None), (b"\r\n\r\n", None),
    ],
)  # fmt: skip
@pytest.mark.one_in(4)
def test_a_request_that_does_not_end_is_ended(
    short: Served, data: bytes, status: int | None
) -> None:
    """A socket timeout is an error here; a head that never comes is answered by hanging up."""
    found = spoken(short, data)
    if status is None:
        assert found == b""
        return
    assert found.startswith(b"HTTP/1.1 %d " % status)
    assert set(json.loads(found.partition(b"\r\n\r\n")[2])["error"]) > {"message", "param"}


def test_more_connections_than_allowed_are_told_so(short: Served) -> None:
    address = urlsplit(short.url)
    held = [socket.create_connection((address.hostname, address.port or 0)) for _ in range(20)]
    try:
        assert b" 503 " in spoken(short, b"")
    finally:
        for one in held:
            one.close()
    deadline = time.monotonic() + 5
    while httpx.get(f"{short.url}/health/live").status_code != 200:
        assert time.monotonic() < deadline


def test_request_ids(server: Served) -> None:
    def answered(theirs: str | bytes | None) -> str:
        headers: Any = {} if theirs is None else {"X-Request-ID": theirs}
        return httpx.get(f"{server.url}/health/live", headers=headers).headers["x-request-id"]

    assert answered("mine-1") == "mine-1"
    own = {answered(odd) for odd in (None, "", "a b", "x" * 129, "\u00e9".encode())}
    assert all(len(one) == 32 and one.isalnum() for one in own)
    assert len(own) == 5


def test_requests_are_counted_under_names_of_ours(server: Served) -> None:
    httpx.post(server.url + CHAT, json=SAY, timeout=30)
    httpx.post(server.url + CHAT, json={**SAY, "model": 'x"} 1\nfake'})
    httpx.get(f"{server.url}/made-up-by-a-client")
    counted = httpx.get(f"{server.url}/metrics").text
    assert f'requests_total{{endpoint="{CHAT}",model="demo",status="200"}}' in counted
    assert f'requests_total{{endpoint="{CHAT}",model="",status="404"}}' in counted
    assert "fake" not in counted
    assert "made-up" not in counted


def test_a_model_is_told_by_its_name_whatever_it_is_asked_for_by(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="jackfield.serving")
    server = serve(models={"small": {"model": "demo"}})
    for name in ("small", "demo"):
        httpx.post(server.url + CHAT, json={**SAY, "model": name}, timeout=30)
        assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == "small"
        for path in ("plan", "report"):
            found = httpx.get(f"{server.url}/v1/{path}", params={"model": name}).json()
            assert [*found] == ["small"]
    counted = httpx.get(f"{server.url}/metrics").text
    assert f'requests_total{{endpoint="{CHAT}",model="small",status="200"}} 2.0' in counted
    lines = [json.loads(line) for line in caplog.messages if '"POST"' in line]
    assert [line["model"] for line in lines] == ["small", "small"]
