"""What is nearly right is answered with what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from test_bodies import CHAT, SAY, error_of

import jackfield
from jackfield.errors import PromptError
from jackfield.serving.elsewhere import _PATHS, _POSTED
from jackfield.serving.errors import ApiError
from jackfield.serving.pool import Pool
from jackfield.serving.settings import settings

if TYPE_CHECKING:
    from served import Served


def saying(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


PART = "messages.0.content.0"
PARTS = "a part is of type text, or of type image_url where the model reads images: {"
A_URL = 'an image is a data URL: {"type": "image_url", "image_url": {"url": "data:'


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"stop": [f"x{i}" for i in range(17)]}, "stop", "at most 16 items"),
        (saying({"type": "video_url", "video_url": {"url": "x"}}), f"{PART}.type", PARTS),
        (saying({"type": "image", "image": "x"}), f"{PART}.type", PARTS),
        (saying({"type": "image_url", "image_url": {"base64": "x"}}), f"{PART}.image_url", A_URL),
        (saying({"type": "image_url", "base64": "x"}), f"{PART}.image_url", A_URL),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format",
         "write type json_schema, and json_schema with name and schema"),
        ({"grammar": 'root ::= "a"'}, "grammar", "grammars are Lark's here: write start: …"),
    ],
)  # fmt: skip
def test_a_field_is_answered_with_its_form(
    server: Served, more: dict[str, Any], param: str, words: str
) -> None:
    answer = httpx.post(server.url + CHAT, json={**SAY, **more})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert words in error_of(answer)["message"]


def test_paths_of_others_say_what_there_is(server: Served) -> None:
    there = {(m, r.path) for r in server.server.config.app.routes for m in r.methods or ()}
    for path in (*_PATHS, *_POSTED):
        answer = httpx.post(server.url + path, json={})
        assert answer.status_code == 404, path
        said = error_of(answer)["message"]
        assert said.startswith(f"there is nothing at POST {path}; ")
        words = said.partition("; ")[2].split(" ")
        if words[0] in ("GET", "POST"):
            assert (words[0], words[1].rstrip(",")) in there, said
    assert httpx.get(f"{server.url}/v1/responses/compact").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live", "/v1/models"])
def test_head_is_get_without_a_body(server: Served, path: str) -> None:
    head, get = (httpx.request(method, server.url + path) for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (get.status_code, b"")


def test_the_name_of_an_adapter_is_no_model() -> None:
    models = {"small": {"model": "demo", "adapters": {"fr": "FOLDER"}}}
    pool = Pool(settings(models=models), jackfield.load)
    with pytest.raises(ApiError, match="it is an adapter: write model 'small' and adapter 'fr'"):
        pool["fr"]


def test_a_mask_beside_a_text() -> None:
    with jackfield.load("demo") as engine:
        for prompt in ("a", ["a", "b"], [{"role": "user", "content": "a"}]):
            with pytest.raises(PromptError, match="and a text has no padding; drop it"):
                engine.generate(prompt, attention_mask=[[1]], max_new_tokens=1)
