"""Images in chat completions: data URLs, and nothing that would be fetched or read from disk."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import extras
import httpx
import pytest

import jackfield
from jackfield.bridge.image_reader import ImageReader
from jackfield.demo import MODEL_PATH

if TYPE_CHECKING:
    from PIL import Image
    from served import Served

with extras.imports():
    from seeing import build, chat, picture


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def said(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part), "detail": "auto"}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture
def seeing(tmp_path: Path, serve: Callable[..., Served]) -> Callable[..., Served]:
    model, processor = build("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    served = {"see": {"model": str(tmp_path)}, "read": {"model": str(MODEL_PATH)}}
    return lambda **settings: serve(models=served, **settings)


def body(messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "see", "messages": messages, "max_tokens": 9, "temperature": 0, **more}


def asking(server: Served) -> Callable[..., httpx.Response]:
    url = f"{server.url}/v1/chat/completions"
    return lambda messages, **more: httpx.post(url, json=body(messages, **more), timeout=60)


@pytest.fixture
def ask(seeing: Callable[..., Served]) -> Callable[..., httpx.Response]:
    return asking(seeing())


class Held:
    """Processors are held up by the next image until `go`; `read` counts those that came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came, self.go, self.read = threading.Semaphore(0), threading.Event(), 0
        own = ImageReader.read

        def reading(reader: ImageReader, where: str, image: Any) -> Any:
            self.read += 1
            self.came.release()
            assert self.go.wait(60)
            return own(reader, where, image)

        monkeypatch.setattr(ImageReader, "read", reading)


@pytest.fixture
def held(seeing: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a server, load its model, and hold up its processor."""
    made: list[Held] = []

    def start(**settings: Any) -> tuple[Served, Held]:
        server = seeing(**settings)
        assert asking(server)(said("text")).status_code == 200
        made.append(Held(monkeypatch))
        return server, made[-1]

    yield start
    for one in made:
        one.go.set()


def test_images_of_messages_are_read(ask: Callable[..., httpx.Response], tmp_path: Path) -> None:
    parts = ("what is ", picture(0), " and ", picture(1), " here")
    with jackfield.load(tmp_path) as engine:
        wanted = [
            engine.generate([chat(*own)], max_new_tokens=9, do_sample=False)[0]
            for own in (parts, ("text",), ("what is ", picture(1), " and ", picture(0), " here"))
        ]
    assert wanted[0].text != wanted[2].text
    found = ask(said(*parts)).json()
    assert found["choices"][0]["message"]["content"] == wanted[0].text
    assert found["usage"]["prompt_tokens"] == wanted[0].usage.prompt_tokens
    assert ask(said("text")).json()["choices"][0]["message"]["content"] == wanted[1].text
    lines = ask(said(*parts), stream=True).text.splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces]
    assert "".join(deltas) == wanted[0].text


def test_what_is_no_image_is_answered(ask: Callable[..., httpx.Response]) -> None:
    right = said("a ", picture(0))

    def of(part: Any) -> Any:
        return [{"role": "user", "content": [part]}]

    for messages, param, why in (
        (of({"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}),
         "messages", "message 0, part 0: these bytes are no image that is read here"),
        (of({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
         "messages", "nothing is fetched from 'https://example.org/a.png'"),
        (of({"type": "image_url", "image_url": {"url": "/etc/hostname"}}),
         "messages", "is neither a data URL nor a web address"),
        (of({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}),
         "messages", "is neither a data URL nor a web address"),
        (of({"type": "image_url", "image_url": {"url": url(picture(0)), "detail": "high"}}),
         "messages.0.content.0.image_url.detail", "auto"),
        (of({"type": "image_url"}), "messages.0.content.0.image_url", "is a data URL"),
        (of({"type": "image", "image": "/etc/hostname"}),
         "messages.0.content.0.type", "a part is of type text, or of type image_url"),
        (of({"type": "image", "path": "/etc/hostname"}),
         "messages.0.content.0.type", "a part is of type text, or of type image_url"),
    ):  # fmt: skip
        answer = ask(messages)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert why in error["message"]
    answer = ask(right, model="read")
    assert answer.status_code == 400
    assert "nothing here reads a part of type 'image_url'" in answer.text
    assert ask(right).status_code == 200


@pytest.mark.parametrize(
    ("path", "asked", "param", "why"),
    [
        ("completions", {"prompt": said("a ", picture(0))},
         "prompt", "Input should be a valid string"),
        ("completions", {"prompt": [url(picture(0))], "image_url": "a"},
         "image_url", "nothing here reads the field"),
        ("responses", {"input": said("a ", picture(0))},
         "input.0.content.0", "not of type input_text"),
        ("responses",
         {"input": [{"role": "user", "content": [
             {"type": "input_image", "image_url": url(picture(0)), "detail": "auto"}]}]},
         "input.0.content.0", "not of type input_text"),
    ],
)  # fmt: skip
def test_endpoints_without_images_say_so(
    server: Served, path: str, asked: dict[str, Any], param: str, why: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "demo", **asked}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert why in error["message"]


def test_no_text_waits_for_images_that_are_read(held: Any) -> None:
    """However many there are; and these enter beside a stream that runs."""
    server, images = held()
    ask, many = asking(server), 8
    texts = [ask(said("text")).json()["choices"], ask(said("go on"), max_tokens=600).json()]
    with ThreadPoolExecutor(many) as clients:
        coming = [clients.submit(ask, said("a ", picture(n))) for n in range(many)]
        assert images.came.acquire(timeout=60)
        assert ask(said("text")).json()["choices"] == texts[0]
        stream = body(said("go on"), max_tokens=600, stream=True)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=stream) as answer:
            lines = answer.iter_lines()
            got = [next(lines)]
            assert not any(one.done() for one in coming)
            images.go.set()
            found = [one.result() for one in coming]
            got += lines
    pieces = [json.loads(line[6:]) for line in got if line.startswith("data: {")]
    deltas = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces]
    assert "".join(deltas) == texts[1]["choices"][0]["message"]["content"]
    alone = [ask(said("a ", picture(n))) for n in range(many)]
    assert [one.status_code for one in found] == [200] * many
    assert [one.json()["choices"] for one in found] == [one.json()["choices"] for one in alone]


def test_of_a_client_that_goes_no_further_image_is_read(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, images = held()
    served, ended = server.pool["see"], threading.Event()
    submit = served.engine.submit_samples

    def submitting(*given: Any, **asked: Any) -> Any:
        try:
            return submit(*given, **asked)
        finally:
            ended.set()

    monkeypatch.setattr(served.engine, "submit_samples", submitting)
    data = json.dumps(body(said(picture(0), picture(1), picture(2)))).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        assert images.came.acquire(timeout=60)
    for _ in range(6000):
        if not served.in_use:
            break
        time.sleep(0.01)
    images.go.set()
    assert ended.wait(60)
    assert (served.in_use, images.read) == (0, 1)
    assert asking(server)(said("a ", picture(0))).status_code == 200


def test_a_deadline_passes_between_images(held: Any) -> None:
    server, images = held(deadline=2.0)
    with ThreadPoolExecutor(1) as clients:
        coming = clients.submit(asking(server), said(picture(0), picture(1), picture(2)))
        assert images.came.acquire(timeout=60)
        time.sleep(2.1)
        images.go.set()
        answer = coming.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline"), answer.text
    assert "deadline of 2 s passed while it was read" in answer.text
    assert images.read == 1


def test_a_deadline_is_not_spent_twice(held: Any) -> None:
    """What reading took of it is not there for the model, in however many texts."""
    server, images = held(deadline=2.0)
    with ThreadPoolExecutor(1) as clients:
        coming = clients.submit(asking(server), said(picture(0)), n=2, temperature=1)
        assert images.came.acquire(timeout=60)
        time.sleep(2.1)
        images.go.set()
        answer = coming.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline"), answer.text
    assert "its deadline of 2 s passed" in answer.text
