"""Tools, documents, variables of a template arrive as transformers says them, or are named."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build, character_tokenizer
from poison import GREEDY
from tool_templates import HERMES, LLAMA, TEMPLATES, tool, with_template
from transformers import PreTrainedTokenizerFast

import jackfield
from jackfield.bridge import chat_templates
from jackfield.bridge.chat_templates import ChatTemplate
from jackfield.bridge.chats import text_of
from jackfield.errors import PromptError, SettingsError
from jackfield.requests.chat_settings import chat_settings_of

USER = {"role": "user", "content": "Is it raining in Bergen?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [tool("weather", city={"type": "string"}), tool("time", zone={"enum": ["CET", "é<\"'"]})]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DOCUMENTS = PLAIN + "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"


def asked(template: str, messages: list[Any] | None = None, **said: Any) -> str:
    settings, rest = chat_settings_of(said)
    assert not rest
    return text_of(messages or [USER], ChatTemplate(with_template(template), settings))


def weather(city: str, days: int = 1) -> str:
    """
    Says what the weather will be.

    Args:
        city: Where.
        days: How far ahead.
    """
    return f"{city} {days}"


@pytest.mark.parametrize("tools", [None, [], TOOLS[:1], TOOLS, [weather, TOOLS[1]]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_arrive_as_transformers_says_them(name: str, tools: Any) -> None:
    for chat in ([USER], [SYSTEM, USER], [USER, {"role": "assistant", "content": "a"}, USER]):
        expected = with_template(TEMPLATES[name]).apply_chat_template(
            chat, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert asked(TEMPLATES[name], chat, tools=tools) == expected
        assert ("weather" in expected) == bool(tools)


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (HERMES, {"enable_thinking": False}),
        (HERMES, {"enable_thinking": True}),
        (LLAMA, {"date_string": "1 May", "tools_in_user_message": False}),
        (PLAIN + "{{ bos_token }}", {"bos_token": "<s>"}),
        (PLAIN + "{{ x.y[0] if x }}", {"x": {"y": [1]}}),
        (PLAIN + "{{ x.y[0] if x }}", {"x": None}),
    ],
)
def test_variables_arrive_as_transformers_says_them(template: str, variables: Any) -> None:
    made = with_template(template)
    expected = made.apply_chat_template(
        [USER], tools=TOOLS, tokenize=False, add_generation_prompt=True, **variables
    )
    if "tools" in template:
        assert asked(template, tools=TOOLS, chat_template_kwargs=variables) == expected
    else:
        assert asked(template, chat_template_kwargs=variables) == expected


@pytest.mark.parametrize("thinks", [True, False])
def test_the_switch_of_thoughts_is_a_setting_by_itself(thinks: bool) -> None:
    told = {"enable_thinking": thinks}
    expected = asked(HERMES, chat_template_kwargs=told)
    assert asked(HERMES, **told) == asked(HERMES, **told, chat_template_kwargs=told) == expected
    found, rest = chat_settings_of({**told, "seed": 1})
    assert rest == {"seed": 1}
    with pytest.raises(PromptError, match="enable_thinking or chat_template_kwargs is about chat"):
        found.refuse_without_chat()


def test_documents_arrive() -> None:
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    assert asked(DOCUMENTS, documents=documents).endswith("[a: b][c: d]")
    assert asked(PLAIN, documents=[]) == asked(PLAIN)


def test_a_template_for_tools_is_taken_where_there_are_tools() -> None:
    made = with_template("")
    made.chat_template = {"default": PLAIN, "tool_use": PLAIN + "{{ tools }}"}
    settings, _ = chat_settings_of({"tools": TOOLS})
    assert "weather" in text_of([USER], ChatTemplate(made, settings))
    assert "weather" not in text_of([USER], ChatTemplate(made))


DROPPED: list[tuple[str, dict[str, Any], str]] = [
    (PLAIN, {"tools": TOOLS}, r"tools\[0\]: the chat template does not read it"),
    (PLAIN + "{{ tools[0] }}", {"tools": TOOLS}, r"tools\[1\]"),
    (PLAIN + "{{ 'tools' if tools }}", {"tools": TOOLS}, r"tools\[0\]"),
    (PLAIN, {"documents": [{"text": "a"}]}, r"documents\[0\]"),
    (PLAIN + "{{ documents[0].text }}", {"documents": [{"text": "a"}, {"text": "a"}]}, r"ts\[1\]"),
    (PLAIN, {"chat_template_kwargs": {"enable_thinking": True}}, "reads no 'enable_thinking'"),
    (PLAIN, {"enable_thinking": False}, "reads no 'enable_thinking'"),
    (HERMES, {"chat_template_kwargs": {"enable_thinkin": True}}, "reads no 'enable_thinkin'"),
    (PLAIN + "{% set x = 1 %}{{ x }}", {"chat_template_kwargs": {"x": 2}}, "reads no 'x'"),
    (PLAIN + "{{ m.x }}{{ 'y' }}", {"chat_template_kwargs": {"x": 2}}, "reads no 'x'"),
    (PLAIN + "{{ m.x }}{{ 'y' }}", {"chat_template_kwargs": {"y": 2}}, "reads no 'y'"),
    (PLAIN + "{{ namespace() }}", {"chat_template_kwargs": {"namespace": 2}}, "no 'namespace'"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "said", "why"), DROPPED)
def test_what_a_template_does_not_read_is_named(
    template: str, said: dict[str, Any], why: str
) -> None:
    with pytest.raises(PromptError, match=why):
        asked(template, **said)


def test_a_template_may_look_into_what_it_is_told() -> None:
    """Where a probe in its place is refused, or shown otherwise, what it says itself decides."""
    template = PLAIN + (
        "{% for t in tools or [] %}{% if t.function.name != 'weather' %}"
        "{{ raise_exception('strange') }}{% endif %}{{ t.function.description }}{% endfor %}"
    )
    assert "Does weather." in asked(template, tools=TOOLS[:1])
    template = PLAIN + "{{ (tools or []) | length }}"
    assert asked(template, tools=TOOLS).endswith("2")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": {"a": 1}}, "tools must be a list"),
        ({"tools": [3]}, r"tools\[0\] must be an object of JSON, not 3"),
        ({"tools": [lambda x: x]}, r"tools\[0\]: transformers makes no schema of '<lambda>'"),
        ({"tools": [{"a": {1, 2}}]}, r"tools\[0\] is not JSON"),
        ({"enable_thinking": "yes"}, "enable_thinking must be True or False, not 'yes'"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "contradict each other",
        ),
        ({"documents": ["text"]}, r"documents\[0\] must be an object"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"a": torch}}, "chat_template_kwargs is not JSON"),
        ({"chat_template_kwargs": {"a b": 1}}, "which no variable can be called"),
        ({"chat_template_kwargs": {"__class__": 1}}, "which no variable can be called"),
        ({"chat_template_kwargs": {"tools": []}}, "setting by itself"),
        ({"chat_template_kwargs": {"messages": []}}, "the messages are the prompt"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "never chooses a template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "about tokens"),
    ],
)
def test_what_is_no_tool_or_variable_is_named(said: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        chat_settings_of(said)


def test_no_argument_of_transformers_reaches_a_template_as_a_variable() -> None:
    """Each parameter of `apply_chat_template` is answered by name."""
    names = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    for name in names - {"self", "kwargs"}:
        with pytest.raises(SettingsError, match=name):
            chat_settings_of({"chat_template_kwargs": {name: None}})


def test_a_nest_that_is_too_deep_is_told() -> None:
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    for said in ({"tools": [{"a": deep}]}, {"chat_template_kwargs": {"a": deep}}):
        with pytest.raises(SettingsError, match="is not JSON"):
            chat_settings_of(said)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", [*GREEDY][::8])
def test_tools_and_variables_stay_within_the_bounds(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    said = {"tools": TOOLS, "chat_template_kwargs": {"x": [1] * 100}}
    with pytest.raises(PromptError, match="the chat template"):
        asked(PLAIN + "{{ x }}{{ tools }}" + GREEDY[what], **said)


def test_what_is_told_is_weighed() -> None:
    """A template may say large tools; and not make far more of small ones."""
    large = [tool(f"tool{n}", text={"description": "word " * 2000}) for n in range(200)]
    assert asked(HERMES, tools=large).count("Does tool") == 200
    with pytest.raises(PromptError, match="far more text"):
        asked(PLAIN + "{{ x * 30000000 }}", chat_template_kwargs={"x": "a"})


class Own(PreTrainedTokenizerFast):
    """Renders by itself, and reads `depth`."""

    def apply_chat_template(
        self, conversation: Any, *, tools: Any = None, depth: int = 1, **how: Any
    ) -> str:
        text = "".join(m["content"] for m in conversation)
        for one in tools or []:
            text += one.pop("type")  # it may write into what it is given
        return text + "!" * int(depth == 2)


def test_a_tokenizer_that_renders_by_itself_is_told() -> None:
    made = Own(tokenizer_object=character_tokenizer().backend_tokenizer)

    def rendered(**said: Any) -> str:
        return text_of([USER], ChatTemplate(made, chat_settings_of(said)[0]))

    tools = [tool("a"), tool("b")]
    assert rendered(tools=tools).endswith("functionfunction")
    assert tools == [tool("a"), tool("b")]
    assert rendered(chat_template_kwargs={"depth": 2}).endswith("!")
    for name in ("width", "tiefe"):
        with pytest.raises(PromptError, match=f"reads no '{name}'"):
            rendered(chat_template_kwargs={name: 1})
    with pytest.raises(PromptError, match=r"documents\[0\]"):
        rendered(documents=[{"text": "a"}])


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    made = with_template(
        PLAIN + "{{ (tools or []) | tojson }}{{ x }}{{ documents }}{{ add_generation_prompt }}"
    )
    made.add_special_tokens({"additional_special_tokens": ["~", "{"]})
    with jackfield.load(build("llama", torch.float64), tokenizer=made, decoding="sample") as found:
        yield found


SAID: list[dict[str, Any]] = [
    {"tools": [{"name": "f"}]}, {"documents": [{"a": "b"}]}, {"chat_template_kwargs": {"x": "y"}},
]  # fmt: skip


@pytest.mark.parametrize(
    "said", [*SAID, {"continue_final_message": True}, {"add_generation_prompt": False}]
)
def test_a_call_says_them(engine: jackfield.Engine, said: dict[str, Any]) -> None:
    chat, short = [{"role": "user", "content": "a"}], {"max_new_tokens": 2}
    text = asked(engine.tokenizer.chat_template, chat, **said)
    ids = engine.tokenizer(text)["input_ids"]
    (expected,) = engine.generate(ids, **short)
    (found,) = engine.generate(chat, **said, **short)
    assert found.usage.prompt_tokens == len(ids)
    assert found.token_ids == expected.token_ids
    assert engine.submit(chat, **said, **short).result().token_ids == expected.token_ids
    *_, last = engine.stream(chat, **said, **short)
    assert last.completion is not None
    assert last.completion.token_ids == expected.token_ids
    assert last.completion.usage.prompt_tokens == len(ids)
    plain, own = engine.generate([chat, chat], settings=[{}, said], **short)
    assert plain.usage.prompt_tokens != own.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("said", SAID)
def test_they_are_about_chats(engine: jackfield.Engine, said: dict[str, Any]) -> None:
    (name,) = said
    for prompt in ("Hello", [5, 6]):
        with pytest.raises(PromptError, match=f"{name} is about chat messages"):
            engine.generate(prompt, **said)
        nothing = type(said[name])()
        assert engine.generate(prompt, max_new_tokens=1, **{name: nothing})


def forced(text: str, end: int) -> Any:
    """What has a model say the characters of `text`, and then the token `end`."""
    ids = [*character_tokenizer()(text)["input_ids"], end]
    start = 3

    def allowed(number: int, tokens: torch.Tensor) -> list[int]:
        return [ids[len(tokens) - start]]

    return {"prefix_allowed_tokens_fn": allowed, "eos_token_id": end, "max_new_tokens": len(ids)}


@pytest.mark.parametrize("end", ["<end>", "}", "~"])
def test_special_tokens_are_text_where_they_are_asked_for(
    engine: jackfield.Engine, end: str
) -> None:
    """All but the one that ends it; an EOS that is text is text, as ever."""
    made = engine.tokenizer
    say = forced("a{b{{c", made.convert_tokens_to_ids(end))
    last = "}" * (end == "}")
    for special, text in ((True, "abc" + last), (False, "a{b{{c" + last)):
        how = {**say, "skip_special_tokens": special}
        (found,) = engine.generate([7, 8, 9], **how)
        assert (found.text, found.finish_reason) == (text, "stop")
        assert "".join(d.text for d in engine.stream([7, 8, 9], **how)) == text
    cut = {**say, "skip_special_tokens": False, "stop": ["{{"]}
    (found,) = engine.generate([7, 8, 9], **cut)
    assert found.text == "a{b"


def test_special_tokens_with_beams() -> None:
    made = character_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["{"]})
    with jackfield.load(
        build("llama", torch.float64), tokenizer=made, decoding="beam?num_beams=2"
    ) as found:
        say = forced("a{b", made.convert_tokens_to_ids("<end>"))
        texts = [
            found.generate([7, 8, 9], skip_special_tokens=special, **say)[0].text
            for special in (True, False)
        ]
    assert texts == ["ab", "a{b"]


def test_special_tokens_are_about_text(engine: jackfield.Engine) -> None:
    with pytest.raises(SettingsError, match="must be True or False, not 'no'"):
        engine.generate([5], skip_special_tokens="no")
    with (
        jackfield.load(build("llama", torch.float64)) as bare,
        pytest.raises(SettingsError, match="skip_special_tokens is about text"),
    ):
        bare.generate([5], skip_special_tokens=False)
