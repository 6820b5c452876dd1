"""What an answer in a chat says: `content`, `reasoning` and `tool_calls`, whole and as it comes."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from saying import CALLS, NOISE, TOOLS, written
from tool_models import ASKED, NOW, THINKING, loaded, saying, tokenizer_of
from tool_templates import TEMPLATES, tool

import jackfield
from jackfield import Completion, Delta
from jackfield.bridge.tokenizer import Text
from jackfield.contracts import Settings
from jackfield.engine.turns import Heard, Turns
from jackfield.errors import SettingsError, UsageError
from jackfield.parsing import formats
from jackfield.parsing.calling import Calling
from jackfield.parsing.said import Said, ToolCall, ToolCallDelta, whole
from jackfield.requests.chat_settings import ChatSettings


def marks_of(name: str) -> tuple[str, ...]:
    """What models of a form have as tokens of their own."""
    form = formats.format_of(tokenizer_of(TEMPLATES[name]))
    frame = () if form._frame is None else form._frame.marks
    found = [*frame, *(form.thought or ()), *(formats.harmony.MARKS * (form.name == "harmony"))]
    return tuple(dict.fromkeys(mark.strip() for mark in found if len(mark.strip()) > 1))


@functools.cache
def turns_of(name: str, *, special: bool) -> Turns:
    made = tokenizer_of(TEMPLATES[name], marks_of(name) if special else ())
    return Turns(Text(made, len(made)))


def heard(turns: Turns, ids: list[int], **settings: Any) -> Heard:
    turn = turns.turn(
        ASKED, ChatSettings(tools=TOOLS), Settings(max_new_tokens=1, **settings), [1, 2]
    )
    assert turn is not None
    found = Heard(turn, 0)
    found.told(ids)
    return found


def put_together(pieces: list[Said[ToolCallDelta]]) -> tuple[str, str, list[Any]]:
    """What a reader of all pieces has in the end."""
    calls: dict[int, list[Any]] = {}
    for found in (call for said in pieces for call in said.tool_calls):
        if found.index not in calls:
            assert found.id
            assert found.name
            calls[found.index] = [found.id, found.name, "", False]
        else:
            assert found.id is found.name is None
        own = calls[found.index]
        assert not own[3]
        own[2], own[3] = own[2] + found.text, found.ended
    assert list(calls) == list(range(len(calls)))
    assert all(call[3] for call in calls.values())
    content, reasoning = ("".join(getattr(s, n) for s in pieces) for n in ("content", "reasoning"))
    return content, reasoning, [call[:3] for call in calls.values()]


def as_told(said: Said[ToolCall]) -> tuple[str, str, list[Any]]:
    return said.content, said.reasoning, [[c.id, c.name, c.text] for c in said.tool_calls]


@pytest.mark.timeout(60)  # and not for ever
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@pytest.mark.one_in(4)
def test_the_deltas_of_a_stream_add_up_to_the_whole(
    name: str, special: bool, data: st.DataObject
) -> None:
    """However steps cut the tokens, whatever is read first, where marks are tokens or are not."""
    turns = turns_of(name, special=special)
    if data.draw(st.booleans()):
        most = 1 if name in ("llama", "llama_4", "harmony") else 3
        text = written(name, "", data.draw(st.lists(CALLS, min_size=1, max_size=most)))
        text = text[: data.draw(st.integers(0, len(text)))] + data.draw(NOISE)
    else:
        text = data.draw(NOISE)
    ids = turns.text.read(text)
    plain = turns.text.decode(ids)
    found = heard(turns, ids)
    said = found.whole(ids, plain)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12))
    pairs = list(itertools.pairwise(sorted([0, len(ids), *cuts])))
    order = data.draw(st.permutations(range(len(pairs))))
    last = len(pairs) - 1
    pieces = {n: found.piece(*pairs[n], last=n == last) for n in order}
    assert put_together([pieces[n] for n in range(len(pairs))]) == as_told(said)
    if not special and found._turn.marks.keys().isdisjoint(ids):
        reader = parser(turns)
        reader.name = f"{found._turn.name}/0"
        assert said == whole([*reader.push(plain), *reader.finish()])
    for call in said.calls:
        assert (call.whole and isinstance(call.arguments, dict)) or not is_json(call.text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def parser(turns: Turns) -> Calling:
    return turns.form.parser(TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
@given(calls=st.lists(CALLS, min_size=1, max_size=1), stop=st.booleans())
@pytest.mark.one_in(4)
def test_calls_whose_marks_are_special_tokens_are_found(
    name: str, calls: list[Any], stop: bool
) -> None:
    """Though the text leaves them out, and where a stop string is watched for."""
    turns = turns_of(name, special=True)
    ids = turns.text.read(written(name, "", calls))
    stops = ("Zq is said nowhere", "<|channel|>", "[TOOL_CALLS]") if stop else ()
    said = heard(turns, ids, stop_strings=stops).whole(ids, turns.text.decode(ids))
    assert [(call.name, call.arguments) for call in said.tool_calls] == calls
    assert said.content.strip() == ""


def test_a_text_ends_before_its_stop_string_with_marks_too() -> None:
    turns = turns_of("hermes", special=True)
    ids = turns.text.read(f"Let me see. {NOW} It is STOP")
    found = heard(turns, ids, stop_strings=("STOP",))
    said = found.whole(ids, "not looked at")
    assert said.content == "Let me see. It is "
    assert len(said.calls) == 1
    pieces = [found.piece(n, n + 1, last=n + 1 == len(ids)) for n in range(len(ids))]
    assert put_together(pieces) == as_told(said)


#: What a model that may think writes, and: content, thought, calls and whether they are whole.
HOSTILE: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("<think>", "", None, []),
    ("<think>\n\n</think>\n\nYes.", "Yes.", None, []),
    ("<think>Hm", "", "Hm", []),
    ("<think>a<think>b</think>c</think>d", "c</think>d", "a<think>b", []),
    ("a<think>b</think>", "a<think>b</think>", None, []),
    (f"<think>{NOW}</think>No.", "No.", NOW, []),
    (f"<think>Hm</think>{NOW}", "", "Hm", [("now", {})]),
    (f"Yes: {NOW}{NOW}", "Yes:", None, [("now", {}), ("now", {})]),
    (f"<tool_call>{NOW}", "<tool_call>", None, [("now", {})]),
    (NOW.replace("now", "rm"), NOW.replace("now", "rm"), None, []),
    (NOW.removesuffix("</tool_call>"), "", None, [("now", {})]),
    (NOW[:20], NOW[:20], None, []),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><think>"}}</tool_call>!',
        "!", None, [("weather", {"city": "</tool_call><think>"})],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "<tool_call>{\\"name\\": 1}"}}',
        "", None, [("weather", {"city": '<tool_call>{"name": 1}'})],
    ),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Ber', "", None, [("weather", None)]),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": Bergen}}',
        "Bergen}}", None, [("weather", None)],
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    with loaded(THINKING) as found:
        yield found


def told(completion: Completion) -> tuple[Any, ...]:
    calls = [(c.name, c.arguments if c.whole else None) for c in completion.tool_calls]
    return completion.content, completion.reasoning, calls


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HOSTILE)
@pytest.mark.one_in(4)
def test_a_completion_is_parted(
    engine: jackfield.Engine, text: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    (found,) = engine.generate([ASKED], **saying(engine, text))
    assert found.text == text
    assert told(found)[1:] == (reasoning, calls)
    assert found.content == content
    assert told(engine.submit(ASKED, **saying(engine, text)).result()) == told(found)
    deltas = list(engine.stream(ASKED, **saying(engine, text)))
    assert deltas[-1].completion is not None
    assert told(deltas[-1].completion) == told(found)
    joined = put_together([delta._said for delta in deltas])
    assert joined == (found.content, found.reasoning or "", [
        [call.id, call.name, call.text] for call in found.tool_calls
    ])  # fmt: skip
    assert "".join(delta.content for delta in deltas) == found.content
    assert "".join(delta.reasoning for delta in deltas) == joined[1]


def test_who_does_not_ask_pays_nothing(
    engine: jackfield.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody looked at it")

    for owner, name in ((Turns, "form"), (Heard, "piece"), (Heard, "whole")):
        monkeypatch.setattr(owner, name, property(asked) if name == "form" else asked)
    (found,) = engine.generate([ASKED], **saying(engine, NOW))
    assert found.text == NOW
    assert "".join(d.text for d in engine.stream(ASKED, **saying(engine, NOW))) == NOW
    with pytest.raises(AssertionError, match="somebody looked"):
        assert found.content


def test_what_is_no_chat_is_all_content(engine: jackfield.Engine) -> None:
    how = saying(engine, f"<think>a</think>{NOW}", tools=None)
    (found,) = engine.generate("Hello", **how)
    assert (found.content, found.reasoning, found.tool_calls) == (found.text, None, [])
    assert found.message == {"role": "assistant", "content": found.text}
    assert "content" not in found.to_dict()
    for delta in engine.stream("Hello", max_new_tokens=3):
        assert (delta.content, delta.reasoning, delta.tool_calls) == (delta.text, "", [])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
@pytest.mark.parametrize("text", ["<think>Hm</think>Yes.", f"Well. {NOW}"])
def test_what_is_copied_is_read(engine: jackfield.Engine, copied: Any, text: str) -> None:
    (found,) = engine.generate([ASKED], **saying(engine, text))
    own = copied(found)
    assert own == found
    assert (told(own), own.message) == (told(found), found.message)
    assert own.to_dict() == found.to_dict()
    pieces = [copied(delta) for delta in engine.stream(ASKED, **saying(engine, text))]
    assert "".join(delta.content for delta in pieces) == found.content
    assert isinstance(pieces[0], Delta)


def test_deltas_that_were_merged_say_what_they_said(engine: jackfield.Engine) -> None:
    text = f"<think>Hm</think>Yes. {NOW}"
    deltas = list(engine.stream(ASKED, **saying(engine, text)))
    assert len(deltas) > 40
    for at in range(1, len(deltas)):
        both = [Delta.merged(deltas[:at]), Delta.merged(deltas[at:])]
        (found,) = put_together([both[0]._said, both[1]._said])[2]
        assert "".join(one.content for one in both) == "Yes."
        assert "".join(one.reasoning for one in both) == "Hm"
        assert found[1:] == ["now", "{}"]


def test_an_answer_that_begins_in_a_thought(engine: jackfield.Engine) -> None:
    how = saying(engine, "Hm</think>Yes.", chat_template_kwargs={"thinks": True})
    assert told(engine.generate([ASKED], **how)[0]) == ("Yes.", "Hm", [])
    begun = [*ASKED, {"role": "assistant", "content": "<think>I"}]
    how = saying(engine, " see</think>Yes.", continue_final_message=True)
    assert told(engine.generate([begun], **how)[0]) == ("Yes.", "see", [])
    begun[-1]["content"] += " see</think>"
    how = saying(engine, "Yes</think>.", continue_final_message=True)
    assert told(engine.generate([begun], **how)[0]) == ("Yes</think>.", None, [])
    how = saying(engine, "Yes</think>.", add_generation_prompt=False,
                 chat_template_kwargs={"thinks": True})  # fmt: skip
    assert engine.generate([ASKED], **how)[0].reasoning is None


@pytest.mark.parametrize("held", [{"choices": ["Yes."]}, {"json_schema": {"const": 1}}])
def test_what_is_confined_is_no_thought(engine: jackfield.Engine, held: dict[str, Any]) -> None:
    """Though the prompt has opened one: a text that cannot end it is for the reader."""
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    thinks = {"chat_template_kwargs": {"thinks": True}, "max_new_tokens": 9, **held}
    (found,) = engine.generate([ASKED], **thinks)
    assert found.text in ("Yes.", "1")
    assert (found.content, found.reasoning) == (found.text, None)
    assert "".join(delta.content for delta in engine.stream(ASKED, **thinks)) == found.text


def test_a_grammar_may_have_a_thought(engine: jackfield.Engine) -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    thinks = {"chat_template_kwargs": {"thinks": True}, "max_new_tokens": 30}
    (found,) = engine.generate([ASKED], regex="Hm</think>Yes", **thinks)
    assert (found.content, found.reasoning) == ("Yes", "Hm")


#: As DeepSeek R1's: where the assistant goes on after a result, no thought is opened.
REASONER = TEMPLATES["deepseek"].replace(
    "{{- '<|assistant|>' }}",
    "{%- if messages[-1].role != 'tool' %}{{- '<|assistant|><think>\\n' }}{%- endif %}",
)


def test_after_a_result_a_template_may_open_no_thought() -> None:
    form = formats.format_of(tokenizer_of(REASONER))
    assert form.starts_in_reasoning()
    assert not form.starts_in_reasoning(after_tool=True)
    for name in TEMPLATES:
        form = formats.format_of(tokenizer_of(TEMPLATES[name]))
        for kwargs in ({}, {"thinking": True}):
            begins = form.starts_in_reasoning(kwargs)
            assert form.starts_in_reasoning(kwargs, after_tool=True) == begins


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_is_as_the_template_reads_it(name: str) -> None:
    """What is said, called and thought goes on into the next turn as the model wrote it."""
    calls = [("weather", {"city": "Bergen", "days": 1})]
    turns = turns_of(name, special=False)
    text = written(name, "", calls)
    ids = turns.text.read(text)
    found = heard(turns, ids)
    message = found.message(found.whole(ids, text))
    assert set(message) == {"role", "content", "tool_calls"}
    (call,) = message["tool_calls"]
    result = {"role": "tool", "content": "rain", "tool_call_id": call["id"], "name": "weather"}
    tokenizer: Any = turns.text.tokenizer
    again = tokenizer.apply_chat_template([*ASKED, message, result], tools=TOOLS, tokenize=False)
    assert text.strip().rstrip("]") in again.replace(call["id"], "a" * 9)
    said = found.message(Said("Yes.", "Hm"))
    assert said["content"] == "Yes."
    assert ("reasoning_content" in said) == turns.form.reads_thoughts


def test_ids_are_of_the_prompt_and_the_sample(engine: jackfield.Engine) -> None:
    def ids(prompt: Any) -> list[str]:
        (found,) = engine.generate([prompt], **saying(engine, NOW + NOW))
        return [call.id for call in found.tool_calls]

    assert ids(ASKED) == ids(ASKED)
    assert len({*ids(ASKED), *ids([*ASKED, *ASKED])}) == 4
    found = engine.generate([ASKED], num_return_sequences=2, do_sample=True, **saying(engine, NOW))
    assert len({one.tool_calls[0].id for one in found}) == 2


def test_a_form_that_is_not_known_is_told() -> None:
    unknown = TEMPLATES["hermes"].replace("<tool_call>", "<odd>").replace("</tool_call>", "</odd>")
    with loaded(unknown) as odd:
        (found,) = odd.generate([ASKED], **saying(odd, NOW))
        deltas = list(odd.stream(ASKED, **saying(odd, NOW)))
        (plain,) = odd.generate([ASKED], max_new_tokens=1)
    for one in (found, *deltas, pickle.loads(pickle.dumps(found))):  # noqa: S301
        with pytest.raises(UsageError, match="in no form that is known here, so none can be"):
            assert one.tool_calls
    assert found.content == "".join(delta.content for delta in deltas) == NOW
    assert "tool_calls" not in found.to_dict()
    assert plain.tool_calls == plain.to_dict()["tool_calls"] == []


def test_a_call_that_breaks_off_cannot_be_made(engine: jackfield.Engine) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Ber'
    (found,) = engine.generate([ASKED], **saying(engine, text))
    (call,) = found.tool_calls
    assert (call.whole, call.text) == (False, '{"city": "Ber')
    with pytest.raises(UsageError, match="the call of weather breaks off"):
        assert call.arguments
    assert "tool_calls" not in found.message
    (listed,) = found.to_dict()["tool_calls"]
    assert (listed["arguments"], listed["text"]) == (None, call.text)
    assert json.dumps(listed)


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([{"type": "function"}], r"tools\[0\] must be like"),
        ([{"type": "search", "name": "f"}], r"tools\[0\] must be like"),
        ([{"type": "function", "function": {"name": 3}}], r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], r"tools\[0\].function.name"),
        ([{"name": "f", "parameters": "none"}], r"tools\[0\].parameters must be a JSON schema"),
        (
            [{"name": "f", "parameters": {"type": "array"}}],
            r"tools\[0\].parameters must be the sch",
        ),
        ([tool("now"), tool("now")], r"tools\[1\]: there are two functions 'now'"),
    ],
)
def test_tools_that_are_no_functions_are_named(
    engine: jackfield.Engine, tools: Any, why: str
) -> None:
    for ask in (engine.generate, engine.submit, engine.stream):
        with pytest.raises(SettingsError, match=why):
            ask(ASKED, tools=tools)
    assert engine.generate([ASKED], tools=[tool("größe:1/b")], max_new_tokens=1)


@example(text="<think>")
@given(text=NOISE)
def test_a_thought_alone_is_never_content(text: str) -> None:
    turns = turns_of("hermes", special=False)
    ids = turns.text.read(f"<think>{text}")
    said = heard(turns, ids).whole(ids, turns.text.decode(ids))
    assert said.content in text
    assert not (said.content and "</think>" not in text)
