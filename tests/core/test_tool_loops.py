"""A conversation with calls: what is said goes on into the next turn, by every form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saying import TOOLS, written
from tool_models import ASKED, NOW, THINKING, answering, loaded, model_of, saying
from tool_templates import TEMPLATES

import jackfield
from jackfield.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs/chat.md"
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'


def test_the_page_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python runs, one block after another, with a model that calls and thinks."""
    answers = {
        "Is it raining in Bergen?": f"<think>I must look.</think>Let me see.\n{WEATHER}",
        "rain in Bergen": "<think>Rain!</think>Yes, it is.",
    }
    prompts = answering(monkeypatch, answers)
    load = jackfield.load
    model, tokenizer = model_of(THINKING)
    monkeypatch.setattr(jackfield, "load", lambda _: load(model, tokenizer=tokenizer))
    printed: list[str] = []
    monkeypatch.setattr(
        "builtins.print", lambda *said, **how: printed.append("".join(map(str, said)))
    )
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    names["engine"].close()
    assert [len(prompt) for prompt in prompts] == [1, 1, 3, 1]
    said = "".join(printed)
    assert names["completion"].content == "Yes, it is."
    for text in ("I must look.", "Let me see.", "weather", '{"city": "Bergen"}', "Yes, it is."):
        assert text in said


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    with loaded(THINKING) as found:
        yield found


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(4)
def test_a_loop_goes_on_with_the_message(name: str) -> None:
    """The message and the result of its call are read by the engine, whatever the template."""
    with loaded(TEMPLATES[name]) as engine:
        text = written(name, "", [("weather", {"city": "Bergen"})])
        (found,) = engine.generate([ASKED], **saying(engine, text, skip_special_tokens=False))
        (call,) = found.tool_calls
        assert call.arguments == {"city": "Bergen"}
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "rain"}
        chat = [*ASKED, found.message, result]
        (last,) = engine.generate([chat], **saying(engine, "Yes."))
        assert (last.content, last.tool_calls) == ("Yes.", [])
        ended = [*chat, last.message, *ASKED]
        assert engine.generate([ended], max_new_tokens=1, tools=TOOLS)[0].token_ids


def test_a_thought_goes_on_where_the_template_reads_it(engine: jackfield.Engine) -> None:
    (found,) = engine.generate([ASKED], **saying(engine, f"<think>Hm</think>{NOW}"))
    assert found.message["reasoning_content"] == "Hm"
    result = {"role": "tool", "content": "noon"}
    assert engine.generate([[*ASKED, found.message, result]], max_new_tokens=1)
    (cut,) = engine.generate([ASKED], **saying(engine, "<think>Hm"))
    assert cut.message == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert engine.generate([[*ASKED, cut.message, *ASKED]], max_new_tokens=1)


def weather(city: str, days: int = 1) -> str:
    """The weather of some days.

    Args:
        city: The name of a city.
        days: How many.
    """
    return f"rain in {city} for {days}"


class Station:
    def weather(self, city: str) -> str:
        """The weather of today.

        Args:
            city: The name of a city.
        """
        return f"rain in {city}"


@pytest.mark.parametrize("function", [weather, Station().weather])
@pytest.mark.parametrize("way", ["generate", "submit", "stream"])
def test_functions_are_tools(
    engine: jackfield.Engine, function: Callable[..., str], way: str
) -> None:
    how = saying(engine, WEATHER, tools=[function])
    if way == "generate":
        (found,) = engine.generate([ASKED], **how)
    elif way == "submit":
        found = engine.submit(ASKED, **how).result()
    else:
        *_, delta = engine.stream(ASKED, **how)
        assert delta.completion is not None
        found = delta.completion
    (call,) = found.tool_calls
    assert function(**call.arguments).startswith("rain in Bergen")


def untyped(city):  # type: ignore[no-untyped-def]
    """Untyped.

    Args:
        city: A city.
    """


def untold(city: str) -> str:
    return city


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (untyped, r"tools\[1\]: transformers makes no schema of 'untyped'"),
        (untold, r"tools\[1\]: transformers makes no schema of 'untold'"),
        (len, r"tools\[1\] must be an object of JSON"),
        (Station, r"tools\[1\] must be an object of JSON"),
        ("weather", r"tools\[1\] must be an object of JSON, not 'weather'"),
        (weather, r"tools\[1\]: there are two functions 'weather'"),
    ],
)
def test_what_makes_no_tool_is_named(engine: jackfield.Engine, wrong: Any, why: str) -> None:
    for ask in (engine.generate, engine.submit, engine.stream):
        with pytest.raises(SettingsError, match=why):
            ask(ASKED, tools=[weather, wrong])
    (found,) = engine.generate([ASKED], **saying(engine, "Yes."))
    assert found.content == "Yes."
