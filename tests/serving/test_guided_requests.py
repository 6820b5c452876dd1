"""Guidance over HTTP: what the engine says, for each endpoint; mistakes name their field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from openai import OpenAI
    from served import Served

STORY = "Once upon a time there was a"
AWAY = "Once upon a time there was a fox"
CHAT: list[dict[str, str]] = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]
OTHER = [{"role": "user", "content": "Sort these numbers: 5 6"}]
GUIDED: dict[str, Any] = {"guidance_scale": 3.0}


@pytest.mark.parametrize("away", [AWAY, OTHER, None], ids=["text", "chat", "none"])
def test_a_text_is_led_as_the_engine_leads_it(client: OpenAI, server: Served, away: Any) -> None:
    more = GUIDED if away is None else {**GUIDED, "negative_prompt": away}
    asked: Any = {"model": "demo", "prompt": STORY, "max_tokens": 12, "temperature": 0}
    plain = server.engine.generate(STORY, max_new_tokens=12, temperature=0)[0].text
    right = server.engine.generate(STORY, max_new_tokens=12, temperature=0, **more)[0].text
    assert right != plain
    assert client.completions.create(**asked, extra_body=more).choices[0].text == right
    stream = client.completions.create(**asked, extra_body=more, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == right


def test_a_chat_is_led_away_from_another(client: OpenAI, server: Served) -> None:
    more = {**GUIDED, "negative_prompt": OTHER}
    right = server.engine.generate([CHAT], max_new_tokens=12, temperature=0, **more)[0].text
    asked: Any = {"model": "demo", "temperature": 0, "extra_body": more}
    chat = client.chat.completions.create(messages=CHAT, max_completion_tokens=12, **asked)
    assert chat.choices[0].message.content == right
    response = client.responses.create(input=CHAT, max_output_tokens=12, **asked)  # type: ignore[arg-type]
    assert response.output_text == right


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"negative_prompt": AWAY}, "negative_prompt", "guidance_scale leads away from"),
        ({"guidance_scale": "much"}, "guidance_scale", "valid number"),
        ({"guidance_scale": -1}, "guidance_scale", "greater than or equal to 0"),
        ({**GUIDED, "negative_prompt": ""}, "negative_prompt", "negative_prompt"),
        ({**GUIDED, "negative_prompt": []}, "negative_prompt", "at least 1 item"),
        (
            {**GUIDED, "negative_prompt": [{"role": "tool", "content": "x"}]},
            "negative_prompt.0.role", "system",
        ),
        ({**GUIDED, "negative_prompt": "word " * 3000}, "negative_prompt", "shorten the prompt"),
        ({"cfg_scale": 2.0}, "cfg_scale", "write guidance_scale"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_field(
    server: Served, more: dict[str, Any], field: str, words: str
) -> None:
    body = {"model": "demo", "prompt": STORY, "max_tokens": 4, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    assert words in error["message"]
