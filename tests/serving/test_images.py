"""Images in chat completions: data URLs, and nothing that would be fetched or read from disk."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import extras
import httpx
import pytest

import jackfield
from jackfield.demo import MODEL_PATH

if TYPE_CHECKING:
    from PIL import Image

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
def ask(tmp_path: Path, serve: Callable[..., Any]) -> Callable[..., httpx.Response]:
    model, processor = build("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    served = {"see": {"model": str(tmp_path)}, "read": {"model": str(MODEL_PATH)}}
    server = serve(models=served)

    def post(messages: Any, **more: Any) -> httpx.Response:
        body = {"model": "see", "messages": messages, "max_tokens": 9, "temperature": 0, **more}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    return post


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
         "messages", "is no data URL, and nothing is fetched here"),
        (of({"type": "image_url", "image_url": {"url": "/etc/hostname"}}),
         "messages", "is no data URL, and nothing is fetched here"),
        (of({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}),
         "messages", "is no data URL, and nothing is fetched here"),
        (of({"type": "image_url", "image_url": {"url": url(picture(0)), "detail": "high"}}),
         "messages.0.content.0.image_url.detail", "auto"),
        (of({"type": "image_url"}), "messages.0.content.0.image_url", ""),
        (of({"type": "image", "image": "/etc/hostname"}), "messages.0.content.0.type", ""),
        (of({"type": "image", "path": "/etc/hostname"}), "messages.0.content.0.type", ""),
    ):  # fmt: skip
        answer = ask(messages)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert why in error["message"]
    answer = ask(right, model="read")
    assert answer.status_code == 400
    assert "nothing here reads a part of type 'image_url'" in answer.text
    assert ask(right).status_code == 200
