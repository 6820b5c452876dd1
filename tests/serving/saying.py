"""Texts as models write them in each form, and what is in them; with hypothesis."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

from hypothesis import strategies as st
from json_values import json_values
from tool_templates import TEMPLATES, tool, with_template

from jackfield.parsing.formats import Format, format_of
from jackfield.parsing.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    merged,
)

TOOLS = [
    tool(
        "weather",
        city={"type": "string"},
        days={"type": "integer"},
        deep={"type": "object"},
        many={"type": "array"},
        sure={"type": "boolean"},
    ),
    tool("now"),
]
VALUES = json_values(st.text(max_size=8), 3, 6)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(max_size=12).filter(lambda text: "</parameter>" not in text),
        "days": st.integers(),
        "deep": st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
        "many": st.lists(VALUES, max_size=3),
        "sure": st.booleans(),
    },
)
CALLS = st.tuples(st.just("weather"), ARGUMENTS) | st.just(("now", {}))
PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "\n", " ", '{"name": "now", "arguments": {}}',
        '{"name": "weather", "arguments": {"city": "', '"}}', "}", "{", '"', "\\", "[TOOL_CALLS]",
        "[", "]", ",", ";", "[ARGS]", "now", "weather", "now()", "weather(days=1)", "(", ")",
        "city='", "<function=now>", "</function>", "<parameter=city>", "</parameter>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>",
        "<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>", "<think>", "</think>", "<|python_tag|>",
        '{"name": "now", "parameters": {}}', "<|channel|>", "analysis", "final", "<|message|>",
        "<|start|>", "assistant", "commentary to=functions.now ", "<|constrain|>", "json",
        "<|end|>", "<|call|>", "to=functions.weather", "a", "é", "𝄞", "<", "tool",
        '{"days": 1}', '{"days": 01}', "{}", "nul", "-", "\x00", '"id": "x", ',
    ]
)  # fmt: skip
NOISE = st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join)


@functools.cache
def form(name: str) -> Format:
    return format_of(with_template(TEMPLATES[name]))


def written(name: str, content: str, calls: list[tuple[str, Any]]) -> str:
    """The turn of an assistant with these calls, as the template writes it, without its ends."""
    tokenizer, used = with_template(TEMPLATES[name]), form(name)
    listed = [
        {"id": "a" * 9, "type": "function", "function": {"name": n, "arguments": json.dumps(given)}}
        for n, given in calls
    ]
    said = {"role": "assistant", "content": content, "tool_calls": listed}
    user = {"role": "user", "content": "Zq"}

    def rendered(*messages: Any) -> str:
        return str(tokenizer.apply_chat_template(used.messages(messages), tokenize=False))

    whole = rendered(user, said)
    head = rendered(user, {"role": "assistant", "content": "ZQ"}).partition("ZQ")[0]
    if name == "harmony":
        head = head.rpartition("<|start|>assistant")[0] + "<|start|>assistant"
    if not whole.startswith(head):  # a blank before plain text
        head = head.rstrip()
    assert whole.startswith(head)
    text = whole[len(head) :]
    text = text.removeprefix("<|python_start|><|python_end|>")
    for end in ("<|im_end|>\n", "<|eot_id|>", "<end>", "<|end|>", "<|call|>"):
        text = text.removesuffix(end)
    return text


def read(parser: Any, text: str, cuts: list[int] | None = None) -> list[Part]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    found: list[Part] = []
    for start, end in itertools.pairwise(places):
        found += parser.push(text[start:end])
    return merged([*found, *parser.finish()])


def numbered(parts: list[Part]) -> list[Part]:
    """Without the ids, which are drawn anew."""
    return [CallBegun(p.index, "", p.name) if isinstance(p, CallBegun) else p for p in parts]


def text_of(parts: list[Part], kind: type[Content | Reasoning] = Content) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def calls_in(parts: list[Part]) -> list[tuple[str, str, bool]]:
    """Name, arguments, whole; indices and ids are as they must be, and parts in their order."""
    begun = [part for part in parts if isinstance(part, CallBegun)]
    ended = {part.index: part.whole for part in parts if isinstance(part, CallEnded)}
    assert [call.index for call in begun] == list(range(len(begun))) == list(ended)
    assert len({call.id for call in begun}) == len(begun)
    open_: int | None = None
    for part in parts:
        if isinstance(part, CallBegun):
            assert open_ is None
            open_ = part.index
        elif isinstance(part, CallArguments | CallEnded):
            assert open_ == part.index
            open_ = None if isinstance(part, CallEnded) else open_
        else:
            assert open_ is None
    pieces = {call.index: "" for call in begun}
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index] += part.text
    return [(call.name, pieces[call.index], ended[call.index]) for call in begun]
