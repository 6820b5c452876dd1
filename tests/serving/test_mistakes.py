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
        (said({"type": "image_url", "image_url": {"url": "x"}}), "messages.0.content.0.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [*SAY, {"role": "assistant", "content": "a"}]}, "continue_final_message"),
        ({"tool_choice": "never"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stop": [1]}, "stop"),
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
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_its_field(client: OpenAI, more: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": SAY, **more}
    basic = {name: body.pop(name) for name in ("model", "messages")}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**basic, extra_body=body)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_a_model_that_is_not_listed_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are demo") as caught:
        client.chat.completions.create(model="gpt-2", messages=SAY)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
