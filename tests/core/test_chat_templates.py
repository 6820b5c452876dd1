"""Chat templates say what transformers says, within bounds; nothing of a chat is dropped."""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from families import character_tokenizer
from poison import GREEDY
from tool_templates import TEMPLATES, with_template
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import jackfield
from jackfield.bridge import chat_templates
from jackfield.bridge.chat_templates import ChatTemplate
from jackfield.bridge.chats import text_of
from jackfield.demo import MODEL_PATH
from jackfield.errors import PromptError, SettingsError
from jackfield.requests.chat_settings import ChatSettings

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
JOINED = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
#: In the manner of those of published models: namespaces, macros, tools, what was thought.
AGENT = """
{%- macro call(one) %}<call>{{ one.function.name -}}
  ({{ one.function.arguments | tojson(indent=2) }}){% endmacro %}
{%- set ns = namespace(last=0, seen=[]) %}
{%- for m in messages[::-1] %}
  {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- set ns.seen = ns.seen + [m.role ~ loop.index] %}
  {%- if m.role == 'assistant' %}
    {%- set said = (m.content or '').split('</think>')[-1].strip() | replace('\\t', '    ') %}
    {{- '<a>' + said + ('%s|%02d' % ('x', loop.index0 % 3)) }}
    {%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content }}{% endif %}
    {%- for one in m.tool_calls or [] %}{{ call(one) }}{% endfor %}
  {%- elif m.role == 'tool' %}{{ '<result>' ~ (m.content or 'none') }}
  {%- elif m.role in ('system', 'user') %}{{ '<' ~ m.role ~ '>' ~ m.content | trim }}
  {%- else %}{{ raise_exception('no such role: ' ~ m.role) }}{% endif %}
{%- endfor %}
{{- ns.seen | join(',') }}{{ {'a': [1, 2.5, none, true]} | tojson }}{{ 'ab' * 3 }}{{ 2 ** 5 }}
{{- '{:>5}'.format('x') }}{{ messages | map(attribute='role') | join(' ') }}{{ bos_token }}
{%- if add_generation_prompt %}<a>{% endif %}"""

USER, SYSTEM = {"role": "user", "content": "How are\n you? "}, {"role": "system", "content": "Be."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": [1, "<"]}}}],
}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER, {"role": "assistant", "content": "<think>hm</think>Fine,\tthanks."}, USER],
]


def tokenizer(template: str) -> Any:
    made = character_tokenizer()
    made.chat_template = template
    return made


def asked(template: str, messages: list[Any]) -> str:
    return text_of(messages, ChatTemplate(tokenizer(template)))


@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
@pytest.mark.parametrize("template", [PLAIN, JOINED, BOTH, AGENT, "demo"])
def test_a_chat_is_what_transformers_makes_of_it(template: str, chat: list[Any]) -> None:
    made = AutoTokenizer.from_pretrained(MODEL_PATH) if template == "demo" else tokenizer(template)
    expected = made.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text_of(chat, ChatTemplate(made)) == expected


GOES_ON = ChatSettings(continue_final_message=True)
ENDS = [
    "7 23", " two  ", "", "a {{ b }} CONTINUE", "x\n\n", "<think>hm</think>Fine,\tthanks.",
]  # fmt: skip


@pytest.mark.parametrize("template", [PLAIN, JOINED, BOTH, AGENT, "demo"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_message_goes_on_as_in_transformers(template: str, end: str, role: str) -> None:
    made = AutoTokenizer.from_pretrained(MODEL_PATH) if template == "demo" else tokenizer(template)
    chat = [SYSTEM, USER, {"role": role, "content": end}]

    def theirs(**how: bool) -> str | None:
        try:
            return str(made.apply_chat_template(chat, tokenize=False, **how))
        except Exception:  # noqa: BLE001 - whatever transformers or the template says
            return None

    for ours, how in (
        (ChatSettings(continue_final_message=True), {"continue_final_message": True}),
        (ChatSettings(add_generation_prompt=True), {"add_generation_prompt": True}),
        (ChatSettings(add_generation_prompt=False), {"add_generation_prompt": False}),
    ):
        expected = theirs(**how)
        if expected is None:
            with pytest.raises(PromptError):
                text_of(chat, ChatTemplate(made, ours))
        else:
            assert text_of(chat, ChatTemplate(made, ours)) == expected


def test_what_follows_the_text_of_a_message_that_goes_on_is_not_dropped() -> None:
    for last in (CALL, {**CALL, "content": "I look."}):
        with pytest.raises(PromptError, match=r"no 'content'|does not read 'tool_calls'"):
            text_of([USER, last], ChatTemplate(tokenizer(AGENT), GOES_ON))
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    for template in (PARTS, PLAIN):
        made = ChatTemplate(tokenizer(template), GOES_ON)
        assert text_of([USER, parts], made).endswith("<assistant>a")


def test_a_call_says_how_a_chat_ends(demo: Any) -> None:
    chat = [
        {"role": "user", "content": "Sort these numbers: 41 7 88 23"},
        {"role": "assistant", "content": "7 23"},
    ]
    short: dict[str, Any] = {"max_new_tokens": 12}

    def rendered(**how: bool) -> Any:
        return demo.tokenizer.apply_chat_template(chat, **how)

    with pytest.raises(PromptError, match=r"continue_final_message=True.*add_generation_prompt="):
        demo.generate(chat, **short)
    for asked in (
        {"continue_final_message": True},
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
    ):
        (expected,) = demo.generate(rendered(**asked), **short)
        (found,) = demo.generate(chat, **asked, **short)
        assert found.token_ids == expected.token_ids
        assert demo.submit(chat, **asked, **short).result().token_ids == expected.token_ids
        (own,) = demo.generate([chat], settings=[asked], **short)
        assert own.token_ids == expected.token_ids
    (new,) = demo.generate(chat, continue_final_message=False, **short)
    assert (
        new.token_ids == demo.generate(rendered(add_generation_prompt=True), **short)[0].token_ids
    )
    with pytest.raises(SettingsError, match="contradict each other"):
        demo.generate(chat, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(SettingsError, match="must be True or False, not 'content'"):
        demo.generate(chat, continue_final_message="content")
    for prompt in ("Hello", [5, 6]):
        with pytest.raises(PromptError, match="continue_final_message=True is about chat messages"):
            demo.generate(prompt, continue_final_message=True)
        assert demo.generate(prompt, continue_final_message=False, **short)


@pytest.fixture(scope="module")
def demo() -> Iterator[jackfield.Engine]:
    with jackfield.load("demo") as engine:
        yield engine


def test_calls_and_thoughts_arrive_as_transformers_says_them() -> None:
    thought = {"role": "assistant", "content": "Done.", "reasoning_content": "Because."}
    for chat in ([USER, CALL, {"role": "tool", "content": "3", "tool_call_id": "1"}, thought],
                 [USER, thought, USER]):  # fmt: skip
        expected = tokenizer(AGENT).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert asked(AGENT, chat) == expected


NAMES_IN_SOURCES = {
    "{{ m.reasoning }}": "reasoning",
    "{{ m['reasoning'] }}": "reasoning",
    "{{ m.get('thinking') }}": "thinking",
    "{{ m.reasoning or m.reasoning_content }}": "reasoning_content",
    "{% set own = m.thinking %}{{ own }}": "thinking",
    "{# m.thinking #}": None,
    "m.thinking": None,
    "{{ thinking }}": None,
    "{{ 'my reasoning: ' }}": None,
    "{% set thinking = m.role %}{{ thinking }}": None,
    "{% set ns = namespace(thinking=1) %}{{ ns.thinking }}": None,
    "{{ f(reasoning=m.role) if f is defined }}": None,
}


@pytest.mark.parametrize("source", NAMES_IN_SOURCES)
def test_what_a_template_calls_thoughts(source: str) -> None:
    template = "{% for m in messages %}{{ m.content }}" + source + "{% endfor %}"
    assert ChatTemplate(tokenizer(template)).thought_key == NAMES_IN_SOURCES[source]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_thought_is_told_whatever_it_is_called(name: str) -> None:
    """Not every version of transformers gives it the name that a template reads."""
    used = with_template(TEMPLATES[name])
    read = ChatTemplate(used).thought_key
    assert read == next((k for k in chat_templates.THOUGHTS if f"m.{k}" in TEMPLATES[name]), None)
    texts = set()
    for key in chat_templates.THOUGHTS:
        last = {"role": "assistant", "content": "Zz", key: "Why"}
        if read is None:
            with pytest.raises(PromptError, match=f"does not read '{key}'"):
                text_of([USER, last], ChatTemplate(used))
        else:
            texts.add(text_of([USER, last], ChatTemplate(used)))
    assert len(texts) == (read is not None)
    assert all("Why" in text for text in texts)


@pytest.mark.parametrize("key", chat_templates.THOUGHTS)
def test_a_thought_that_is_over_may_be_left_out_whatever_it_is_called(key: str) -> None:
    chat = [USER, {"role": "assistant", "content": "Done."}, USER]
    thought = [USER, {**chat[1], key: "Because."}, USER]
    assert asked(AGENT, thought) == asked(AGENT, chat)


def test_of_two_thoughts_none_is_dropped() -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert asked(AGENT, [USER, {**said, "reasoning": "b"}]) == asked(AGENT, [USER, said])
    with pytest.raises(PromptError, match="does not read 'thinking'"):
        asked(AGENT, [USER, {**said, "thinking": "c"}])


@pytest.mark.parametrize("template", [PLAIN, JOINED, PARTS, BOTH])
def test_text_parts_are_text(template: str) -> None:
    """Also for a template that reads lists alone, and a string for one that reads no lists."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    said = asked(template, [{"role": "user", "content": parts}])
    assert said == asked(template, [{"role": "user", "content": "Hello there"}])
    assert "<user>Hello there" in said
    assert "type" not in said


@pytest.mark.parametrize("template", [PLAIN, PARTS, BOTH])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image", "image": "x.png"}, "message 1, part 1: .*part of type 'image'"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "part of type 'image_url'"),
        ({"type": "input_audio"}, "part of type 'input_audio'"),
        ({"type": "file"}, "part of type 'file'"),
        ({"type": 3}, "part of type 3"),
        ({"type": "text", "text": "a", "cache_control": {}}, "part 1: .*'cache_control'"),
        ({"type": "text", "text": None}, "part 1: 'text' must be a string"),
        ({"type": "text"}, "part 1: 'text' must be a string"),
        ({"text": "a"}, "part 1: a part is like"),
        ("a", "part 1: a part is like"),
        (None, "part 1: a part is like"),
    ],
)
def test_a_part_that_nothing_reads_is_named(template: str, part: Any, why: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    with pytest.raises(PromptError, match=why):
        asked(template, [USER, {"role": "user", "content": content}])


DROPPING = {
    "a role": ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", 0,
               "system"),
    "all but the last": ("{{ messages[-1].content }}", 0, "system"),
    "all but the first": ("{{ messages[0].content }}", 1, "user"),
    "every text": ("<assistant>", 0, "system"),
}  # fmt: skip


@pytest.mark.parametrize("what", DROPPING)
def test_a_message_that_a_template_drops_is_named(what: str) -> None:
    template, at, role = DROPPING[what]
    with pytest.raises(PromptError, match=rf"message {at} \(role '{role}'\): .* leaves out its"):
        asked(template, [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"name": "Ann"}, "name"),
        ({"tool_calls": CALL["tool_calls"]}, "tool_calls"),
        ({"weight": 0.5}, "weight"),
        ({"reasoning_content": "hm"}, "reasoning_content"),
    ],
)
def test_a_key_that_a_template_does_not_read_is_named(more: dict[str, Any], key: str) -> None:
    with pytest.raises(PromptError, match=rf"message 1 \(role 'assistant'\): .* read '{key}'"):
        asked(PLAIN, [USER, {"role": "assistant", "content": "a", **more}])


def called(*names: str) -> dict[str, Any]:
    calls = [{"id": f"i{n}", "function": {"name": name}} for n, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


CALLS = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
IDS = "{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"


@pytest.mark.parametrize("link", [{"name": "f"}, {"tool_call_id": "i0"}, {"tool_call_id": "x9"}])
def test_a_result_may_say_which_call_it_answers(link: dict[str, Any]) -> None:
    """Where it says what its place says: templates go by that."""
    result = {"role": "tool", "content": "b"}
    chat = [USER, called("f", "g"), {**result, **link}, {**result, "name": "g"}]
    plain = [USER, called("f", "g"), result, result]
    assert asked(PLAIN + CALLS, chat) == asked(PLAIN + CALLS, plain)


@pytest.mark.parametrize(
    ("link", "key"), [({"name": "g"}, "name"), ({"tool_call_id": "i1"}, "tool_call_id")]
)
@pytest.mark.parametrize("role", ["tool", "function", "ipython"])
def test_a_link_to_another_call_is_not_dropped(role: str, link: dict[str, Any], key: str) -> None:
    result = {"role": role, "content": "b", **link}
    with pytest.raises(PromptError, match=rf"message 2 \(role '{role}'\): .* read '{key}'"):
        asked(PLAIN + CALLS, [USER, called("f", "g"), result])
    if key == "tool_call_id":
        assert "i1" in asked(PLAIN + CALLS + IDS, [USER, called("f", "g"), result])


def test_a_name_without_a_call_is_not_dropped() -> None:
    for before in ([], [USER], [USER, {"role": "assistant", "content": "f"}]):
        with pytest.raises(PromptError, match="does not read 'name'"):
            asked(PLAIN, [*before, {"role": "tool", "content": "b", "name": "f"}])


class Own(PreTrainedTokenizerFast):
    """Renders by itself, as classes of other libraries do."""

    def apply_chat_template(self, conversation: Any, **how: Any) -> Any:
        return self.rendered(conversation, how)


def own(rendered: Callable[[Any, Any], Any], messages: list[Any], **how: Any) -> str:
    made = Own(tokenizer_object=character_tokenizer().backend_tokenizer)
    made.rendered = rendered
    return text_of(messages, ChatTemplate(made, ChatSettings(**how)))


def said(*keys: str) -> Callable[[Any, Any], str]:
    """Writes the roles and contents, and these keys."""

    def rendered(messages: Any, how: Any) -> str:
        texts = [f"<{m['role']}>{[m.get(k) for k in ('content', *keys)]}" for m in messages]
        return "".join(texts) + "<assistant>" * how["add_generation_prompt"]

    return rendered


def test_a_tokenizer_that_renders_by_itself_is_asked() -> None:
    assert own(said(), [USER]) == f"<user>[{USER['content']!r}]<assistant>"
    assert own(said(), [USER], add_generation_prompt=False) == f"<user>[{USER['content']!r}]"


@pytest.mark.parametrize("key", ["name", "reasoning_content", "thinking", "tool_calls"])
def test_a_key_that_a_tokenizer_of_its_own_does_not_read_is_named(key: str) -> None:
    chat = [USER, {"role": "assistant", "content": "a", key: "hm"}, USER]
    assert "hm" in own(said(key), chat)
    with pytest.raises(PromptError, match=f"does not read '{key}'"):
        own(said(), chat)


def test_thoughts_that_are_over_may_be_left_out_by_a_tokenizer_of_its_own() -> None:
    def rendered(messages: Any, how: Any) -> str:
        return said()(messages[:-1], how) + said("thinking")(messages[-1:], how)

    chat = [USER, {"role": "assistant", "content": "a", "thinking": "hm"}, USER]
    assert own(rendered, chat) == rendered(chat, {"add_generation_prompt": True})
    assert "hm" not in own(rendered, chat)
    with pytest.raises(PromptError, match="does not read 'thinking'"):
        own(said(), chat)


def test_a_tokenizer_that_writes_into_the_chat_changes_nothing() -> None:
    def rendered(messages: Any, how: Any) -> str:
        found = said()(messages, how)
        for message in messages:
            message["content"] = "gone"
        return found

    chat = [dict(USER), {"role": "assistant", "content": "a"}, dict(USER)]
    before = copy.deepcopy(chat)
    assert own(rendered, chat) == own(said(), chat)
    assert chat == before


def forever(messages: Any, how: Any) -> str:
    while True:
        messages = list(messages)


def by_a_template(messages: Any, how: Any) -> Any:
    """As a class does that only adds something to the model's own template."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}"
    return character_tokenizer().apply_chat_template(messages, chat_template=loop, tokenize=False)


@pytest.mark.parametrize(
    ("rendered", "why"),
    [
        (lambda messages, how: [1, 2, 3], "made a list and no text"),
        (lambda messages, how: None, "made a NoneType and no text"),
        (lambda messages, how: "a" * 17_000_000, "far more text"),
        (forever, "does not end within"),
        (by_a_template, "does not end within"),
        (lambda messages, how: {}["x"], "refuses these messages: 'x'"),
    ],
)
def test_what_a_tokenizer_of_its_own_makes_is_bounded(
    rendered: Callable[[Any, Any], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackfield.bridge.chat_templates.SECONDS", 0.3)
    with pytest.raises(PromptError, match=why):
        own(rendered, [USER])


def test_keys_that_say_nothing_harm_nobody() -> None:
    empty = {"tool_calls": [], "name": None, "refusal": None, "audio": None}
    assert asked(PLAIN, [{**USER, **empty}]) == asked(PLAIN, [USER])


@pytest.mark.parametrize("silent", [{}, {"content": None}])
@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_no_content_is_no_text(role: str, silent: dict[str, Any]) -> None:
    message = {"role": role, **silent}
    if role == "assistant":
        message["tool_calls"] = CALL["tool_calls"]
    template = PLAIN + "{% for m in messages %}{{ (m.tool_calls or [1])[0] }}{% endfor %}"
    said = asked(template, [USER, message, USER])
    assert f"<{role}><" in said
    assert "None" not in said


def test_a_template_that_asks_for_none_is_told_none() -> None:
    template = (
        "{% for m in messages %}{% if m.content is none %}"
        "<calls>{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert "<calls>f" in asked(template, [USER, CALL])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"}, {"role": "user", "content": None}, {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []}, {"content": "a"}, {}, "a", 3,
        None,
        {"role": None, "content": "a"}, {"role": "user", "content": 3},
        {"role": "user", "content": {"text": "a"}}, {"role": "user", "content": b"a"},
        {"role": "user", "content": "a", "more": {1, 2}},
    ],
)  # fmt: skip
def test_what_is_no_message_is_named(message: Any) -> None:
    with pytest.raises(PromptError, match="message"):
        asked(PLAIN, [USER, message])


def test_a_chat_that_is_too_deep_is_told() -> None:
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PromptError, match="message 0 of the chat is not JSON"):
        asked(PLAIN, [{**USER, "more": deep}])


@pytest.mark.timeout(60)  # and not for ever
@pytest.mark.parametrize("what", GREEDY)
@pytest.mark.one_in(4)
def test_a_template_that_takes_too_much_is_stopped(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    with pytest.raises(PromptError, match="the chat template"):
        asked(PLAIN + GREEDY[what], [USER])
    assert asked(PLAIN, [USER])


def test_the_end_is_not_lost_in_a_callback_of_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is raised there is only printed, and whoever raised it is not asked again."""
    monkeypatch.setattr(chat_templates, "SECONDS", 0.3)
    loops = "{% set s = 'a' * 3000 %}" + 2 * "{% for a in s %}" + 2 * "{% endfor %}"
    calls, before = 0, gc.get_threshold()

    def nothing() -> None: ...

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal calls
        if sys.gettrace() is not None and not calls:
            end = time.thread_time() + 0.4
            while time.thread_time() < end:
                calls += 1
                nothing()

    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        with pytest.raises(PromptError, match="does not end within"):
            asked(PLAIN + loops, [USER])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert calls


def test_a_long_chat_is_within_the_bounds() -> None:
    """A thousand messages, and one of a million words."""
    many = [{"role": ("user", "assistant")[n % 2], "content": f"word {n} "} for n in range(1000)]
    assert asked(AGENT, many).count("word") == 1000
    long = "word and\t" * 500_000
    assert asked(AGENT, [USER, {"role": "assistant", "content": long}]).count("word") == 500_000
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = {f"key {n}": [n] * 9 for n in range(5000)}
    assert asked(AGENT, [USER, call]).count("key") == 5000
