"""The ids in an answer are made of that of its request, and each is another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from saying import TOOLS, written
from tool_templates import TEMPLATES, with_template

from jackfield.engine.completions import Delta
from jackfield.parsing.formats import format_of
from jackfield.serving.asking import Asking
from jackfield.serving.output import Output
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.settings import settings
from jackfield.serving.turns import Turn

if TYPE_CHECKING:
    from served import Served

SAY = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAY, "max_tokens": 2},
    "completions": {"prompt": "Hello", "max_tokens": 2},
    "responses": {"input": "Hello", "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_is_called_as_its_request_is_in_the_log(server: Served, path: str) -> None:
    body = {"model": "demo", **BODIES[path]}
    answers = [httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60) for _ in range(2)]
    for answer in answers:
        assert (
            answer.json()["id"].partition("_" if path == "responses" else "-")[2]
            == (answer.headers["x-request-id"])
        )
    assert answers[0].json()["id"] != answers[1].json()["id"]


def items(answer: str) -> list[str]:
    output = Output(answer)
    for delta in ({"reasoning_content": "a"}, {"content": "b"}, {"reasoning_content": "c"}):
        list(output.take({"delta": delta, "logprobs": None}))
    list(output.close("completed"))
    return [item["id"] for item in output.items]


def test_items_are_called_after_their_answer_and_place() -> None:
    one, other = items("one"), items("other")
    assert len({*one, *other}) == 6
    assert items("one") == one
    assert [name.partition("_")[0] for name in one] == ["rs", "msg", "rs"]


class OnlyTokenizer:
    """As much of an engine as a turn looks at before it is taken."""

    def __init__(self) -> None:
        self.tokenizer = with_template(TEMPLATES["hermes"])
        self.chat_format = format_of(self.tokenizer)


def calls(answer: str) -> list[list[str]]:
    """The ids of the calls in two texts of a turn."""
    body = ChatRequest.model_validate(
        {"model": "m", "messages": SAY, "tools": TOOLS, "n": 2, "max_tokens": 9}
    )
    turn = Turn(body, Asking(settings(), "", answer), OnlyTokenizer())  # type: ignore[arg-type]
    text = written("hermes", "", [("now", {}), ("now", {})])
    texts = [turn.parser(number).said(Delta(text, [])) for number in range(2)]
    return [
        [call["id"] for piece in said for call in piece.get("tool_calls", ()) if "id" in call]
        for said in texts
    ]


def test_calls_are_called_after_their_answer_text_and_place() -> None:
    one, other = calls("one"), calls("other")
    found = [name for texts in (one, other) for text in texts for name in text]
    assert len(set(found)) == len(found) == 8
    assert calls("one") == one
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", name) for name in found)  # as Mistral's templates ask
