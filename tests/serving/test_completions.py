"""Chat and text completions, by the real client: streams equal wholes, and wholes the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
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
@pytest.mark.one_in(4)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_no_token_and_an_echo_are_the_prompts(client: OpenAI, stream: bool, n: int) -> None:
    prompts: Any = ["One day", "Once upon"]
    asked: dict[str, Any] = {"model": "demo", "prompt": prompts, "max_tokens": 0, "echo": True}
    right = client.completions.create(**{**asked, "max_tokens": 1}).usage
    if stream:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.completions.create(**asked, n=n, temperature=1, **options)
        usage, texts = last.usage, dict.fromkeys(range(2 * n), "")
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
    else:
        whole = client.completions.create(**asked, n=n, temperature=1)
        usage, texts = whole.usage, {c.index: c.text for c in whole.choices}
        reasons = [choice.finish_reason for choice in whole.choices]
    assert [*texts.values()] == [prompt for prompt in prompts for _ in range(n)]
    assert reasons == ["length"] * 2 * n
    assert usage is not None
    assert right is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (right.prompt_tokens, 0)
    assert usage.total_tokens == usage.prompt_tokens


@pytest.mark.parametrize("echoed", [{}, {"echo": True, "max_tokens": 0}])
@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        (["a", "", "b"], "prompt.1"),
        (["a", "b", "word " * 5000], "prompt.2"),
        ([[1, 2], [999_999]], "prompt.1"),
        ("", "prompt"),
        ([""], "prompt"),
    ],
)
def test_which_prompt_is_no_good_is_told(
    client: OpenAI, prompts: Any, param: str, echoed: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=prompts, **echoed)
    assert caught.value.param == param
    if param != "prompt":
        assert caught.value.body["message"].startswith(f"{param}: ")  # type: ignore[index]
