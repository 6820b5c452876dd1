"""A stream is its whole in pieces: many prompts, stop strings anywhere, characters cut in half."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from served import Served

NAMES = ("Mia", "Tom", "the old king", "a small dog", "Sara")
BEGINNINGS = ("Once upon a time", "One day", "In the garden", "At night", "Near the river")
ENDS = ("", " saw", " wanted", " took", " found", " and a friend", " was", " said")
PROMPTS = [
    f"{beginning} {name}{end}"
    for beginning, name, end in itertools.product(BEGINNINGS, NAMES, ENDS)
]


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[str, str | None]:
    text, reason = "", None
    async for chunk in await client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> tuple[str, str | None]:
    (choice,) = (await client.completions.create(**asked)).choices
    return choice.text, choice.finish_reason


def both(server: Served, bodies: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """(streamed, whole) of each body; all of them at once."""

    async def run() -> list[tuple[Any, Any]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            pairs = (
                asyncio.gather(streamed(client, **body), whole(client, **body)) for body in bodies
            )
            return [tuple(pair) for pair in await asyncio.gather(*pairs)]  # type: ignore[misc]

    return asyncio.run(run())


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
def test_streams_and_wholes_are_what_the_engine_makes_of_each_alone(
    server: Served, count: int
) -> None:
    prompts = PROMPTS[:: len(PROMPTS) // count]
    assert len(prompts) >= count
    bodies = [{"model": "demo", "prompt": p, "max_tokens": 20} for p in prompts]
    pieces, wholes = [], []
    for start in range(0, len(bodies), 100):  # of each body two are open at a time
        found = both(server, bodies[start : start + 100])
        pieces += [one for one, _ in found]
        wholes += [other for _, other in found]
    assert pieces == wholes
    for prompt, (text, reason) in zip(prompts, wholes, strict=True):
        alone = server.engine.generate([prompt], max_new_tokens=20)[0]
        assert (text, reason) == (alone.text, alone.finish_reason)


def test_a_stop_string_is_found_across_every_boundary_of_tokens(server: Served) -> None:
    engine = server.engine
    right = engine.generate(["Once upon a time"], max_new_tokens=24)[0]
    assert right.text is not None
    ends = list(
        itertools.accumulate(len(engine.token_bytes(token).decode()) for token in right.token_ids)
    )
    bodies, texts = [], []
    for end in ends[:-1]:
        stop = right.text[max(0, end - 3) : end + 2]
        bodies.append(
            {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, "stop": stop}
        )
        texts.append(right.text[: right.text.index(stop)])
    for text, (piece, one) in zip(texts, both(server, bodies), strict=True):
        assert piece == one == (text, "stop")


def test_half_a_character_is_never_shown_before_the_end(server: Served) -> None:
    emoji = "\N{THUMBS UP SIGN}\N{FAMILY}"
    assert len(server.engine.tokenizer.encode(emoji)) > 4  # type: ignore[union-attr]
    bodies = [
        {"model": "demo", "prompt": "Hi", "max_tokens": most, "extra_body": {"choices": [emoji]}}
        for most in range(1, 10)
    ]
    for most, (piece, one) in enumerate(both(server, bodies), 1):
        assert piece == one
        text, reason = one
        assert emoji.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")), most
        assert (reason == "stop") == (text == emoji)
