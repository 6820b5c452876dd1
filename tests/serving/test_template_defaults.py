"""What a server tells chat templates by itself: what they read, and a warning for the rest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from test_bodies import CHAT, SAY, error_of
from tool_models import THINKING
from tool_templates import TEMPLATES, with_template

from jackfield.engine.completions import Delta
from jackfield.parsing.formats import format_of
from jackfield.serving.asking import Asking
from jackfield.serving.errors import ApiError
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.settings import settings
from jackfield.serving.turns import Turn, defaults, template_kwargs

if TYPE_CHECKING:
    from collections.abc import Callable

    from served import Served

TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
SWITCH = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
OTHER = TURNS + "{% if thinking %}<think>{% endif %}"
EFFORT = TURNS + "{{ reasoning_effort | default('low') }}"
NONE = TURNS + "{# enable_thinking, thinking, reasoning_effort, date #}enable_thinking"
DATE = TURNS + "{{ date }}"
KEY = "{% for m in messages %}{{ m.content }}{{ m.thinking }}{{ m['enable_thinking'] }}{% endfor %}"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("template", "told", "ignored"),
    [
        (SWITCH, {"enable_thinking": False}, ["chat_template_kwargs.date"]),
        (OTHER, {"thinking": False}, ["chat_template_kwargs.date"]),
        (EFFORT, {}, ["chat_template_kwargs.date", "reasoning"]),
        (NONE, {}, ["chat_template_kwargs.date", "reasoning"]),
        (KEY, {}, ["chat_template_kwargs.date", "reasoning"]),
        (DATE, {"date": "today"}, ["reasoning"]),
    ],
)
def test_a_template_is_told_what_it_reads(
    template: str, told: dict[str, Any], ignored: list[str]
) -> None:
    given = settings(reasoning="off", chat_template_kwargs={"date": "today"})
    assert defaults(given, format_of(with_template(template)), tools=False) == (told, ignored)


@pytest.mark.parametrize(
    ("template", "effort", "told"),
    [
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "high", {"enable_thinking": True}),
        (OTHER, "low", {"thinking": True}),
        (EFFORT, "high", {"reasoning_effort": "high"}),
        (TEMPLATES["harmony"], "high", {"reasoning_effort": "high"}),
        (NONE, "high", None),
        (KEY, "none", None),
    ],
)
def test_an_effort_is_told_or_refused(template: str, effort: str, told: Any) -> None:
    body = ChatRequest.model_validate({**BODY, "reasoning_effort": effort})
    form, asking = format_of(with_template(template)), Asking(settings(), "")
    if told is not None:
        assert template_kwargs(body, asking, form) == told
        return
    with pytest.raises(ApiError) as caught:
        template_kwargs(body, asking, form)
    assert caught.value.param == "reasoning_effort"


def test_a_template_for_tools_is_asked_where_there_are_tools() -> None:
    """Some tokenizers have two templates, and may switch thoughts in one of them alone."""
    made = with_template(TURNS)
    made.chat_template = {"default": TURNS, "tool_use": SWITCH}
    form, asking = format_of(made), Asking(settings(reasoning="off"), "")
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more, told in (
        ({}, {}), ({"tools": tools}, {"enable_thinking": False}),
        ({"tools": tools, "tool_choice": "none"}, {}), ({"tools": []}, {}),
    ):  # fmt: skip
        body = ChatRequest.model_validate({**BODY, **more})
        assert template_kwargs(body, asking, form) == told


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_a_turn_without_tools_thoughts_and_channels_is_plain(name: str) -> None:
    thinks = format_of(with_template(TEMPLATES[name])).thought is not None
    assert format_of(with_template(TEMPLATES[name])).is_plain != (thinks or "harmony" in name)


def test_a_default_that_no_template_reads_is_warned_of_by_name(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="jackfield.serving")
    server = serve(reasoning="off", chat_template_kwargs={"enable_thinking": False, "odd": 1})
    warned = "demo: its chat template reads nothing of chat_template_kwargs.enable_thinking, "
    assert caplog.messages == [f"{warned}chat_template_kwargs.odd, reasoning"]
    assert httpx.post(server.url + CHAT, json=SAY, timeout=30).status_code == 200
    effort = httpx.post(server.url + CHAT, json={**SAY, "reasoning_effort": "low"})
    assert error_of(effort)["param"] == "reasoning_effort"


class OnlyTokenizer:
    """As much of an engine as a turn looks at before it is taken."""

    def __init__(self) -> None:
        self.tokenizer = with_template(THINKING)
        self.chat_format = format_of(self.tokenizer)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({}, {"reasoning_content": "{}"}),
        ({"response_format": {"type": "json_object"}}, {"content": "{}"}),
        ({"choices": ["{}"]}, {"content": "{}"}),
        ({"regex": "[{]}"}, {"content": "{}"}),
        ({"regex": "[{]}(</think>)?"}, {"reasoning_content": "{}"}),
    ],
)
def test_what_is_confined_is_no_thought(held: dict[str, Any], said: dict[str, Any]) -> None:
    """Though the prompt has opened one: a text that cannot end it is for the reader."""
    own = {"chat_template_kwargs": {"thinks": True}, "max_tokens": 9, **held}
    body = ChatRequest.model_validate(BODY | own)
    turn = Turn(body, Asking(settings(), "", "a"), OnlyTokenizer())  # type: ignore[arg-type]
    (found,) = turn.parser(0).said(Delta("{}", []))
    assert {name: value for name, value in found.items() if value} == said


def test_efforts_that_are_the_same_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    form, asking = format_of(with_template(SWITCH)), Asking(settings(), "")
    for effort in ("none", "low", "high", "low"):
        body = {**BODY, "model": "once", "reasoning_effort": effort}
        template_kwargs(ChatRequest.model_validate(body), asking, form)
    assert caplog.text.count("every reasoning_effort but 'none' is the same there") == 1
