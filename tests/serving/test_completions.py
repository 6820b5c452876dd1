"""Chat and text completions, by the real client: streams equal wholes, and wholes the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from openai import OpenAI
    from served import Served

CHAT: Any = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]


def test_a_chat_is_answered_as_the_engine_answers_it(client: OpenAI, server: Served) -> None:
    right = server.engine.generate([CHAT], max_new_tokens=40)[0]
    found = client.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=40)
    (choice,) = found.choices
    assert choice.message.content == right.text == "7 23 41 88"
    assert choice.finish_reason == "stop"
    assert found.usage is not None
    assert found.usage.completion_tokens == right.usage.completion_tokens
    assert found.usage.prompt_tokens == right.usage.prompt_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 3},
        {"stop": ["2", "\n"]},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {"5": -100}},
        {"response_format": {"type": "json_object"}, "max_completion_tokens": 30},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_stream_is_the_whole_in_pieces(client: OpenAI, more: dict[str, Any]) -> None:
    asked = {"model": "demo", "messages": CHAT, "max_completion_tokens": 24, **more}
    whole = client.chat.completions.create(**asked)
    texts = ["" for _ in whole.choices]
    reasons: list[Any] = [None for _ in whole.choices]
    logprobs: list[list[Any]] = [[] for _ in whole.choices]
    for chunk in client.chat.completions.create(**asked, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs and choice.logprobs.content:
                logprobs[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    if "logprobs" in more:
        (choice,) = whole.choices
        assert choice.logprobs is not None
        assert [p.token for p in logprobs[0]] == [p.token for p in choice.logprobs.content or ()]
        assert whole.usage is not None
        assert len(logprobs[0]) == whole.usage.completion_tokens


def test_usage_comes_in_its_own_last_chunk(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_texts_go_on_in_order(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": ["One day", "Once upon"], "max_tokens": 5}
    alone = [
        client.completions.create(**{**asked, "prompt": prompt}).choices[0].text
        for prompt in asked["prompt"]
    ]
    together = client.completions.create(**asked)
    assert [choice.text for choice in together.choices] == alone
    echoed = client.completions.create(**asked, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        f"{prompt}{text}" for prompt, text in zip(asked["prompt"], alone, strict=True)
    ]
