"""What a model says comes out as parts, however it is cut; nothing is lost, nothing is made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from saying import CALLS, NOISE, TOOLS, calls_in, form, numbered, read, text_of, written
from tool_templates import TEMPLATES

from jackfield.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning, merged

FORMS = [*TEMPLATES]
#: Forms whose templates write calls after text.
MARKED = [name for name in FORMS if name not in ("llama", "llama_4", "pythonic", "deepseek")]
ALONE = {"llama", "llama_4", "harmony"}  # whose templates write one call in a turn
WORDS = st.sampled_from(["", "Let me see.", "a {b} [c]", "é\n\n`x`", "<tool_cal", "I call f(a=1)"])


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@pytest.mark.one_in(4)
def test_what_a_template_writes_is_read_back(name: str, data: st.DataObject) -> None:
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=1 if name in ALONE else 3))
    content = data.draw(WORDS) if name in MARKED and not name.startswith("mistral") else ""
    text = written(name, content, calls)
    cuts = data.draw(st.lists(st.integers(0, 4000), max_size=12))
    parts = read(form(name).parser(TOOLS), text, cuts)
    assert numbered(parts) == numbered(read(form(name).parser(TOOLS), text))
    assert text_of(parts) == content
    found = calls_in(parts)
    assert [(n, json.loads(arguments), whole) for n, arguments, whole in found] == [
        (n, arguments, True) for n, arguments in calls
    ]


@pytest.mark.timeout(60)  # and not for ever
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", FORMS)
@given(text=NOISE, cuts=st.lists(st.integers(0, 400), max_size=30))
@example(text='<tool_call>\n<tool_call>{"name": "now", "arguments": {}}', cuts=[])
@example(text='{"name": "now", "parameters": {}};', cuts=[])
@example(text="\x85<|start|> \u2003<tool_call>\x1c[TOOL_CALLS]\x0b<｜tool▁calls▁begin｜>", cuts=[])
def test_any_text_in_any_pieces_has_the_same_parts(
    name: str, thinks: bool, text: str, cuts: list[int]
) -> None:
    def parser() -> Any:
        return form(name).parser(TOOLS, starts_in_reasoning=thinks and name != "harmony")

    parts = read(parser(), text, cuts)
    for others in ([], range(len(text))):
        assert numbered(read(parser(), text, list(others))) == numbered(parts)
    for _, arguments, whole in calls_in(parts):
        if whole:
            assert isinstance(json.loads(arguments), dict)
        else:
            with pytest.raises(ValueError, match=r"."):
                json.loads(arguments)
    if not any(isinstance(part, CallBegun | Reasoning) for part in parts) and not (
        thinks or name == "harmony"
    ):
        assert text_of(parts) == text or "<think>" in text
    assert _letters(parts) <= _letters([Content(text)])


def _letters(parts: list[Part]) -> set[str]:
    """The characters of parts, which come from the text and from nowhere else."""
    return {c for p in parts if isinstance(p, Content | Reasoning) for c in p.text}


#: Looks like a call, and is none.
LOOKS: list[tuple[str, str]] = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": []}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "args": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}, "name": "other"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {"a": tru}, "name": "now"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{name: "now"}</tool_call>'),
    ("hermes", "I write <tool_call> and </tool_call> around calls."),
    ("hermes", '{"name": "now", "arguments": {}}'),
    ("llama", '{"name": "Ann", "age": 3}'),
    ("llama", '{"name": "Ann", "parameters": {}}'),
    ("llama", 'Call {"name": "now", "parameters": {}}'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", "{"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", '[TOOL_CALLS] {"name": "now", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral_named", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral_named", "[TOOL_CALLS]now{}"),
    ("mistral_named", "[TOOL_CALLS]now[ARGS]3"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[now]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[weather(city=x)]"),
    ("pythonic", "[weather(city='a', city='b')]"),
    ("pythonic", "[weather(city='a"),
    ("pythonic", "[other()]"),
    ("pythonic", "I call [now()]"),
    ("coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("coder", "<tool_call>\n<function=now>\n</tool_call>"),
    ("coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBergen"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"),
    ("deepseek_bare", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now"),
]


@pytest.mark.parametrize("more", ["", " ", "\nAnd so on."])
@pytest.mark.parametrize(("name", "text"), LOOKS)
def test_what_only_looks_like_a_call_is_content(name: str, text: str, more: str) -> None:
    for cuts in ([], [*range(200)]):
        assert read(form(name).parser(TOOLS), text + more, cuts) == [Content(text + more)]


def test_a_call_after_one_that_is_none() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for none in ("<tool_call>", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n'):
        for cuts in ([], [*range(200)]):
            parts = read(form("hermes").parser(TOOLS), none + call, cuts)
            assert text_of(parts) == none.rstrip()
            assert calls_in(parts) == [("now", "{}", True)]
            parts = read(form("hermes").parser(TOOLS), call + none + call + none, cuts)
            assert [c[0] for c in calls_in(parts)] == ["now", "now"]
            assert text_of(parts) == none.rstrip() + none


BROKEN: list[tuple[str, str, str, str]] = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ber', '{"city": "Ber', ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1,}}', '{"days": 1,', "}}"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>', '{"a" ',
     "1}}</tool_call>"),
    ("mistral_named", '[TOOL_CALLS]now[ARGS]{"a": 01} b', '{"a": ', "01} b"),
    ("deepseek_bare", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "\\x"}',
     '{"a": "', '\\x"}'),
    ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a": +1}<|call|>', '{"a": ',
     "+1}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments", "rest"), BROKEN)
def test_a_call_that_breaks_off_in_its_arguments_says_so(
    name: str, text: str, arguments: str, rest: str
) -> None:
    for cuts in ([], [*range(200)]):
        parts = read(form(name).parser(TOOLS), text, cuts)
        assert [(a, whole) for _, a, whole in calls_in(parts)] == [(arguments, False)]
        assert text_of(parts) == rest


def test_arguments_come_as_they_are_written() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen", "days": 12}}'
    parser = form("hermes").parser(TOOLS)
    pieces = [part.text for c in text for part in parser.push(c) if isinstance(part, CallArguments)]
    assert "".join(pieces) == '{"city": "Bergen", "days": 12}'
    assert len(pieces) > 20


def test_text_comes_as_it_is_written() -> None:
    """All but what may be the beginning of a mark, and white space before one."""
    parser = form("hermes").parser(TOOLS)
    said = ["A b", " c", " <", "tool", "_ca", "ll", " d\n", "e"]
    found = [text_of(parser.push(piece)) for piece in said]
    assert found == ["A b", " c", "", "", "", "", " <tool_call d", "\ne"]


def test_what_stands_beside_a_call_needs_not_be_right() -> None:
    for tail in ("", "}", "}</tool_call>", ', "id": "x"}</tool_call>', "}\n</tool_call>\n\n"):
        parts = read(
            form("hermes").parser(TOOLS), '<tool_call>{"name": "now", "arguments": {}' + tail
        )
        assert calls_in(parts) == [("now", "{}", True)]
        assert text_of(parts) == ""
    early = '<tool_call>{"id": "1", "arguments": {"days": 1}, "name": "weather"}</tool_call> Done.'
    parts = read(form("hermes").parser(TOOLS), early)
    assert calls_in(parts) == [("weather", '{"days": 1}', True)]
    assert text_of(parts) == " Done."


def test_control_characters_in_arguments_are_escaped() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb\x01"}}</tool_call>'
    ((_, arguments, _),) = calls_in(read(form("hermes").parser(TOOLS), text))
    assert json.loads(arguments) == {"city": "a\n\tb\x01"}


THOUGHT = "<think>\nHm, now.\nYes.\n</think>\n\nIt is noon."


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("split", [1, 2, 3, 1000])
def test_thoughts_are_parts_of_their_own(opened: bool, split: int) -> None:
    text = THOUGHT.removeprefix("<think>") if opened else THOUGHT
    parser = form("hermes").parser(TOOLS, starts_in_reasoning=opened)
    found = [p for at in range(0, len(text), split) for p in parser.push(text[at : at + split])]
    parts = merged([*found, *parser.finish()])
    assert parts == [Reasoning("Hm, now.\nYes."), Content("It is noon.")]


def test_thoughts_that_are_none_or_never_end() -> None:
    def parsed(text: str, *, opened: bool = False) -> list[Part]:
        return read(form("hermes").parser(TOOLS, starts_in_reasoning=opened), text)

    assert parsed("A <think>b</think>") == [Content("A <think>b</think>")]
    assert parsed("<think>\n\n</think>\n\nA") == [Content("A")]
    assert parsed("<think>a <tool_call>") == [Reasoning("a <tool_call>")]
    assert parsed("a", opened=True) == [Reasoning("a")]
    assert parsed("<think>a</think>b", opened=True) == [Reasoning("a"), Content("b")]
    assert parsed("<thin") == [Content("<thin")]
    assert parsed("  <thin") == [Content("  <thin")]
    assert read(form("llama").parser(), "<think>a</think>b") == [Content("<think>a</think>b")]


def test_harmony_in_its_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>One moment.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"days": 2}<|end|><|start|>assistant<|channel|>final'
        "<|message|>Done.<|return|>"
    )
    for cuts in ([], [*range(500)]):
        parts = read(form("harmony").parser(TOOLS), text, cuts)
        assert text_of(parts, Reasoning) == "I look."
        assert text_of(parts) == "One moment.Done."
        assert [c[:2] for c in calls_in(parts)] == [("now", "{}"), ("weather", '{"days": 2}')]
    for plain in ("Hello <|x|>", "to be", "<|channel|>final", "a <|start|>b"):
        assert text_of(read(form("harmony").parser(TOOLS), plain)) == plain
    foreign = "<|channel|>commentary to=browser.open<|message|>{}<|call|>"
    assert text_of(read(form("harmony").parser(TOOLS), foreign)) == foreign[: -len("<|call|>")]


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ALONE])
def test_one_call_where_calls_are_not_parallel(name: str) -> None:
    text = written(name, "", [("now", {}), ("weather", {"days": 1})])
    parser = form(name).parser(TOOLS, parallel=False)
    assert calls_in(read(parser, text, [*range(300)])) == [("now", "{}", True)]
    assert parser.done
    assert not form(name).parser(TOOLS).done


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_may_not_be_are_content(name: str) -> None:
    text = written(name, "", [("now", {})])
    named = {"type": "function", "function": {"name": "weather"}}
    for parser in (
        form(name).parser(),
        form(name).parser(TOOLS, "none"),
        form(name).parser(TOOLS, named),
        form(name).parser(TOOLS[:1]),
    ):
        parts = read(parser, text)
        assert calls_in(parts) == []
        assert text_of(parts) == text
    assert calls_in(read(form(name).parser(TOOLS[1:], "required"), text)) == [("now", "{}", True)]
