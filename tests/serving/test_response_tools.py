"""Thoughts and calls as items of a response: what a chat says, told in the other way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from agents import assert_an_agent_calls_a_tool
from served import Served, serving
from test_tools import PLACE, SAY, loads

pytest.importorskip("llguidance", reason="needs jackfield[structured]")

if TYPE_CHECKING:
    from openai import OpenAI

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": PLACE, "strict": False},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]
OF_CHAT: Any = [
    {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    for tool in TOOLS
]
NAMED: Any = {"type": "function", "name": "weather"}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAID = {
    "text": "It is sunny.",
    "thought, text": "<think>\nhm\n</think>\n\nIt is sunny.",
    "thought, text, calls": f"<think>\nhm\n</think>\n\nLet me see.{WEATHER}\n{NOW}",
    "calls": f"{NOW}\n{WEATHER}",
    "no call": "<tool_call>\n<tool_call>",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(loads("hermes")) as found:
        yield found


def said(text: str, **more: Any) -> dict[str, Any]:
    """A body that has the model say this text."""
    return {"model": "demo", "extra_body": {"regex": re.escape(text)}, **more}


def response_of(client: OpenAI, text: str, *, stream: bool = False, **more: Any) -> Any:
    asked = said(text, input=SAY, tools=TOOLS, max_output_tokens=400) | more
    found: Any = client.responses.create(**asked, stream=stream)
    if not stream:
        return found
    *events, last = found
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    return last.response


def told(response: Any) -> dict[str, Any]:
    """A response's items as the message of a chat."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for item in response.output:
        if item.type == "reasoning":
            found["reasoning"] += item.content[0].text
        elif item.type == "message":
            found["content"] += item.content[0].text
        else:
            found["calls"].append((item.name, item.arguments))
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SAID)
@pytest.mark.one_in(4)
def test_items_are_what_the_chat_says(client: OpenAI, script: str, stream: bool) -> None:
    chat = client.chat.completions.create(
        **said(SAID[script], messages=SAY, tools=OF_CHAT, max_completion_tokens=400)
    )
    right = chat.choices[0].message
    found = response_of(client, SAID[script], stream=stream)
    calls = [(call.function.name, call.function.arguments) for call in right.tool_calls or ()]  # type: ignore[union-attr]
    assert told(found) == {
        "reasoning": getattr(right, "reasoning_content", None) or "",
        "content": right.content or "",
        "calls": calls,
    }
    assert len(calls) == SAID[script].count('"name"')
    assert found.status == "completed"
    assert all(item.status == "completed" for item in found.output)
    thoughts = found.usage.output_tokens_details.reasoning_tokens
    assert (thoughts > 0) == ("thought" in script)
    assert thoughts < found.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_short_is_incomplete(client: OpenAI, stream: bool) -> None:
    found = response_of(client, WEATHER, stream=stream, max_output_tokens=35)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    (call,) = found.output
    assert (call.type, call.status) == ("function_call", "incomplete")


def test_choices_of_tools(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "input": SAY, "tools": TOOLS, "max_output_tokens": 400}
    (call,) = client.responses.create(**asked, tool_choice=NAMED).output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    found = client.responses.create(**asked, tool_choice=allowed)
    names = {item.name for item in found.output if item.type == "function_call"}
    assert names == {"weather"}
    assert len(found.output) > 1
    assert found.tool_choice.to_dict() == allowed  # type: ignore[union-attr]
    assert [tool.name for tool in found.tools] == ["weather", "now"]  # type: ignore[union-attr]
    one = client.responses.create(**asked, tool_choice=allowed, parallel_tool_calls=False)
    assert len(one.output) == 1
    none = client.responses.create(**asked, tool_choice="none")
    assert {item.type for item in none.output} <= {"message", "reasoning"}


def test_what_came_of_a_call_goes_on_as_in_the_chat(client: OpenAI) -> None:
    first = response_of(client, SAID["thought, text, calls"])
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{n} degrees"}
        for n, call in enumerate(calls)
    ]
    more: Any = {"tools": TOOLS, "max_output_tokens": 9}
    linked = client.responses.create(
        model="demo", input=results, previous_response_id=first.id, **more
    )
    items = [item.model_dump(exclude_none=True) for item in first.output]
    replayed = client.responses.create(model="demo", input=[*SAY, *items, *results], **more)
    message = {
        "role": "assistant", "content": "Let me see.", "reasoning_content": "hm",
        "tool_calls": [
            {"id": call.call_id, "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }  # fmt: skip
    tools = [
        {"role": "tool", "tool_call_id": one["call_id"], "content": one["output"]}
        for one in results
    ]
    chat: Any = [*SAY, message, *tools]
    right = client.chat.completions.create(
        model="demo", messages=chat, tools=OF_CHAT, max_completion_tokens=9
    )
    assert right.usage is not None
    for found in (linked, replayed):
        assert found.usage is not None
        assert found.usage.input_tokens == right.usage.prompt_tokens
        assert found.output_text == right.choices[0].message.content
    listed = client.responses.input_items.list(linked.id, order="asc")
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "high", "mode": "pro"}}, "reasoning.mode"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "array"}}]}, "tools"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_field(
    client: OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "demo", "input": SAY, "tools": TOOLS, **more})
    assert caught.value.param == param
    assert "response_format" not in caught.value.message


def test_effort_switches_reasoning(client: OpenAI) -> None:
    ask: Any = {"model": "demo", "input": SAY, "max_output_tokens": 1}
    low, none = (
        client.responses.create(**ask, reasoning={"effort": effort}) for effort in ("low", "none")
    )
    assert none.usage is not None
    assert low.usage is not None
    assert none.usage.input_tokens > low.usage.input_tokens  # a thought is shown as over
    assert none.reasoning is not None
    assert none.reasoning.effort == "none"


THINKS: Any = {"type": "reasoning", "summary": [],
               "content": [{"type": "reasoning_text", "text": "so many words"}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
NOON = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}


@pytest.mark.parametrize(("form", "reads"), [("harmony", True), ("deepseek_bare", False)])
def test_a_thought_is_told_where_the_model_is_told_thoughts(form: str, reads: bool) -> None:
    with (
        serving(loads(form)) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client,
    ):
        counts = [
            response.usage.input_tokens
            for items in ([THINKS, CALL, NOON], [CALL, NOON])
            if (
                response := client.responses.create(
                    model="demo", input=[*SAY, *items], tools=TOOLS, max_output_tokens=1
                )
            ).usage
        ]
        assert (counts[0] > counts[1]) == reads
        if not reads:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="demo", input=[THINKS], max_output_tokens=1)
            assert caught.value.param == "input"


def test_an_agent_calls_a_tool_and_reads_what_came_of_it(server: Served) -> None:
    assert_an_agent_calls_a_tool(server, "OpenAIResponsesModel", NAMED)
