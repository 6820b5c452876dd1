"""What a client gets wrong is told in the field that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from openai import OpenAI

SAY: Any = [{"role": "user", "content": "Hello"}]


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (said({"type": "text"}), "messages.0.content.0.text"),
        (said({"type": "image_url", "image_url": {"url": "x"}}), "messages"),
        (said({"type": "image", "image": "x"}), "messages.0.content.0.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [*SAY, {"role": "assistant", "content": "a"}]}, "continue_final_message"),
        ({"tool_choice": "never"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": 1}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 2}, "n"),
        ({"n": 100, "temperature": 1}, "n"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"many": 5}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": "odd"}}}}, "response_format"),
        ({"regex": "("}, "regex"),
        ({"decoding": "beam"}, "decoding"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"functions": []}, "functions"),
        ({"frequenzy_penalty": 1}, "frequenzy_penalty"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_its_field(client: OpenAI, more: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": SAY, **more}
    basic = {name: body.pop(name) for name in ("model", "messages")}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**basic, extra_body=body)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


ITEM: Any = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"type": "mcp_call"}]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
        ({"input": [ITEM, {**ITEM, "content": [{"type": "input_image"}]}]}, "input.1.content.0"),
        ({"input": [{**ITEM, "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [ITEM, {"type": "function_call_output", "call_id": "a", "output": "b"}]},
         "input.1.call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "a b", "arguments": ""}]},
         "input.0.name"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input.0.id"),
        ({"input": "word " * 600}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "odd"}}}},
         "text.format"),
        ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "f"}]}}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "f"}]}}, "tool_choice.tools.0.name"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"regex": "("}, "regex"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_response_is_told_in_its_field(
    client: OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="Hello", extra_body=more)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("?include=x", "include.0"),
        ("?include[]=message.output_text.logprobs", "include"),
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=many", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
        ("/input_items?before=msg_none", "before"),
    ],
)
def test_a_mistake_behind_a_path_is_told(client: OpenAI, asked: str, param: str) -> None:
    stored = client.responses.create(model="demo", input="Hello", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.get(f"/responses/{stored.id}{asked}", cast_to=object)
    assert caught.value.param == param


def test_a_model_that_is_not_listed_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are demo") as caught:
        client.chat.completions.create(model="gpt-2", messages=SAY)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
