"""Calls of tools over HTTP: streams and wholes, choices, agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from agents import assert_an_agent_calls_a_tool
from served import Served, serving
from tool_templates import TEMPLATES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.demo import MODEL_PATH

pytest.importorskip("llguidance", reason="needs jackfield[structured]")

if TYPE_CHECKING:
    from openai import OpenAI

SAY: Any = [{"role": "user", "content": "What is the weather?"}]
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}},
         "required": ["place"], "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def loads(form: str) -> Any:
    """Loads random weights with room for long prompts, the demo's tokenizer, and a template."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.chat_template = TEMPLATES[form]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    return lambda _, **arguments: jackfield.load(model, tokenizer=tokenizer, **arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(loads("hermes")) as found:
        yield found


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": SAY, "tools": TOOLS, "max_completion_tokens": 400} | more


def streamed(client: OpenAI, **more: Any) -> tuple[dict[int, dict[str, str]], str | None]:
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**asked(**more), stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                own = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                own["id"] += call.id or ""
                assert call.function is not None
                own["name"] += call.function.name or ""
                own["arguments"] += call.function.arguments or ""
    return calls, reason


def test_the_function_that_is_named_is_called(client: OpenAI) -> None:
    found = client.chat.completions.create(**asked(tool_choice=NAMED))
    (choice,) = found.choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
    calls, reason = streamed(client, tool_choice=NAMED)
    assert reason == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        ("weather", call.function.arguments)
    ]


def test_calls_at_once_have_ids_and_numbers_of_their_own(client: OpenAI) -> None:
    how: Any = {"tool_choice": "required", "tools": TOOLS[:1]}
    calls, reason = streamed(client, **how)
    assert reason in ("tool_calls", "length")
    assert [*calls] == [*range(len(calls))]
    assert len(calls) > 1
    assert len({call["id"] for call in calls.values()}) == len(calls)
    alone, reason = streamed(client, **how, parallel_tool_calls=False)
    assert (len(alone), reason) == (1, "tool_calls")


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_tools_that_are_allowed_are_called(client: OpenAI) -> None:
    for name in ("weather", "now"):
        chat = client.chat.completions.create(**asked(tool_choice=allowed("required", name)))
        called = [call.function.name for call in chat.choices[0].message.tool_calls or ()]  # type: ignore[union-attr]
        assert called
        assert set(called) == {name}
    usage = [
        client.chat.completions.create(
            **asked(tool_choice=choice, max_completion_tokens=1, tools=tools)
        ).usage.prompt_tokens  # type: ignore[union-attr]
        for choice, tools in (
            ("auto", TOOLS[1:]), (allowed("auto", "now"), TOOLS), ("auto", TOOLS)
        )
    ]  # fmt: skip
    assert usage[0] == usage[1] < usage[2]


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        (allowed("auto", "now", "then"), TOOLS, "tool_choice.allowed_tools.tools.1.function.name"),
        (allowed("auto", "now"), None, "tool_choice"),
        (allowed("never", "now"), TOOLS, "tool_choice.allowed_tools.mode"),
        (allowed("auto"), TOOLS, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, TOOLS, "tool_choice.allowed_tools"),
    ],
)
def test_tools_that_cannot_be_allowed_are_named(
    client: OpenAI, choice: Any, tools: Any, param: str
) -> None:
    basic = asked(**({"tools": tools} if tools else {}))
    if tools is None:
        del basic["tools"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**basic, tool_choice=choice)
    assert caught.value.param == param


def test_no_tool_may_be_called_where_none_is_chosen(client: OpenAI) -> None:
    found = client.chat.completions.create(**asked(tool_choice="none"))
    assert not found.choices[0].message.tool_calls


def test_what_came_of_a_call_is_read(client: OpenAI) -> None:
    call = {"id": "abcdefghi", "type": "function",
            "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}  # fmt: skip
    told: Any = [
        *SAY,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    ]
    found = client.chat.completions.create(**asked(messages=told))
    assert found.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"enable_thoughts": True}}, "chat_template_kwargs"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_be_is_refused_by_its_field(
    client: OpenAI, more: dict[str, Any], param: str
) -> None:
    basic = {name: value for name, value in asked().items() if name not in more}
    body = {name: value for name, value in more.items() if value is not None}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**basic, extra_body=body)
    assert caught.value.param == param


SUM = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}},
       "required": ["sum"], "additionalProperties": False}  # fmt: skip


def held_to(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "total", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def strictly(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_keeps_to_its_schema_or_is_a_call(client: OpenAI, strict: bool) -> None:
    """What `pydantic_function_tool` and `response_format` of OpenAI's SDK say together."""
    tools = [strictly(tool) for tool in TOOLS[:1]] if strict else TOOLS[:1]
    for seed in range(4):
        found = client.chat.completions.create(
            **asked(tools=tools, seed=seed, temperature=1.5),
            extra_body=held_to(SUM),
        )
        (choice,) = found.choices
        if choice.finish_reason == "length":
            continue
        message = choice.message
        assert (message.tool_calls is None) is (choice.finish_reason == "stop")
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")  # type: ignore[union-attr]
        if not message.tool_calls:
            assert json.loads(message.content or "").keys() == {"sum"}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": NAMED, **held_to(SUM)}, "response_format",
         "response_format: tool_choice requires a call, which has its own; drop one of them"),
        ({"regex": "a+"}, "regex",
         "calls of 'weather', which is strict, have their own; write strict: false there"),
        (held_to({"type": "odd"}), "response_format", "response_format"),
    ],
)  # fmt: skip
def test_two_structures_are_refused_by_their_fields(
    client: OpenAI, more: dict[str, Any], param: str, words: str
) -> None:
    basic = {k: v for k, v in asked(tools=[strictly(TOOLS[0])]).items() if k not in more}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**basic, extra_body=more)
    assert caught.value.param == param, caught.value.message
    assert words in caught.value.message


def test_an_agent_calls_a_tool_and_reads_what_came_of_it(server: Served) -> None:
    assert_an_agent_calls_a_tool(server, "OpenAIChatModel", NAMED)


CALL: Any = {"id": "abcdefghi", "type": "function",
             "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "result", "words"),
    [
        ([CALL], {"tool_call_id": "zzz"}, "no call before it has the id 'zzz'"),
        ([], {"tool_call_id": "abcdefghi"}, "no call before it has the id 'abcdefghi'"),
        ([CALL], {}, "a result names its call"),
    ],
)
def test_a_result_is_that_of_a_call(
    client: OpenAI, before: list[Any], result: dict[str, Any], words: str
) -> None:
    calling = [{"role": "assistant", "tool_calls": before}] if before else []
    told: Any = [*SAY, *calling, {"role": "tool", "content": "sunny", **result}]
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(**asked(messages=told))
    assert caught.value.param == f"messages.{len(told) - 1}.tool_call_id"
