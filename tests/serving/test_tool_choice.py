"""Where a call is required, or keeps to its schema, every text that may come is read as such."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
import tokenizers
from saying import calls_in, form, read, text_of
from tokenizers import decoders, models, pre_tokenizers
from tool_templates import TEMPLATES, tool
from transformers import PreTrainedTokenizerFast

import jackfield
from jackfield.errors import PromptError, SettingsError
from jackfield.parsing.formats import KNOWN, Format, format_of
from jackfield.parsing.parts import Reasoning, merged

llguidance = pytest.importorskip("llguidance", reason="needs jackfield[structured]")

TOOLS = [
    tool(
        "book",
        city={"enum": ["Bergen", "Oslo"]},
        days={"type": "integer", "minimum": 1, "maximum": 20},
        note={"type": "string", "maxLength": 3},
        sure={"type": "boolean"},
        where={"$ref": "#/$defs/place"},
    ),
    tool("now"),
    tool("add", n={"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3}),
]
for each in TOOLS:
    each["function"]["parameters"]["additionalProperties"] = False
TOOLS[0]["function"]["parameters"] |= {
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "null"}},
                        "additionalProperties": False}},
}  # fmt: skip
STRICT = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
#: What a random text may go on with, beside the marks of calls: it would never be found.
ENDS = {
    "harmony": ["<|end|>"],
    "coder": ["\n</parameter>", "<tool_call>"],
    "llama": ["{", "<|python_tag|>"] * 4,
    "llama_4": ["{", "<|python_tag|>"] * 4,
    "pythonic": ["[", "<|python_start|>"] * 4,
}
NAMED = {"type": "function", "function": {"name": "book"}}


@functools.cache
def of_bytes(name: str, *, special: bool) -> PreTrainedTokenizerFast:
    """A token for each byte, and, if `special`, one for each mark of the form."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    marks = {
        "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        "llama": ["<|python_tag|>"],
        "mistral": ["[TOOL_CALLS]"],
        "mistral_named": ["[TOOL_CALLS]", "[ARGS]"],
        "mistral_ids": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        "pythonic_marked": ["<|tool_call_start|>", "<|tool_call_end|>"],
        "llama_4": ["<|python_tag|>"],
        "coder": ["<tool_call>", "</tool_call>"],
        "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"],
        "deepseek_bare": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<think>"],
        "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"],
    }
    if special:
        made.add_special_tokens({"additional_special_tokens": marks.get(name, [])})
    made.chat_template = TEMPLATES[name]
    return made


@functools.cache
def known(name: str, *, special: bool) -> tuple[Format, PreTrainedTokenizerFast, Any]:
    from llguidance.hf import from_tokenizer

    made = of_bytes(name, special=special)
    return format_of(made), made, from_tokenizer(made, n_vocab=len(made))


def walked(name: str, grammar: str, seed: int, *, special: bool) -> str | None:
    """A text that a grammar allows, found at random; None: it got too long."""
    found, made, vocabulary = known(name, special=special)
    draw = random.Random(seed)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    marks = [
        *(found.thought or ())[1:],
        *ENDS.get(name, [found._frame.mark if found._frame else ""]),
    ]
    ids: list[int] = []
    calls = False  # whether a mark was written
    while not matcher.is_stopped():
        assert not matcher.is_error(), matcher.get_error()
        if len(ids) > 1500:
            return None
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        can_end = bits >> made.eos_token_id & 1
        if can_end and (bits.bit_count() == 1 or draw.random() < (0.3 if calls else 0.02)):
            break
        bits &= ~(1 << made.eos_token_id)
        if bits.bit_count() > 50:  # free text, or a string of JSON; what may end it
            said = draw.choice(["a", "é", '"', '"', *marks])
            calls |= said in marks[-1:]
            wanted = made(said)["input_ids"]
        else:
            wanted = [draw.choice([t for t in range(len(made)) if bits >> t & 1])]
        for token in wanted:
            if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                break
            ids.append(token)
    assert matcher.is_accepting() or matcher.is_stopped()
    return str(made.decode(ids, skip_special_tokens=False))


def check(name: str, arguments: str) -> None:
    """Whether the arguments are what the schema of a tool allows."""
    given = json.loads(arguments)
    if name == "book":
        assert {"city", "days"} <= given.keys() <= {"city", "days", "note", "sure", "where"}
        assert given["city"] in ("Bergen", "Oslo")
        assert 1 <= given["days"] <= 20
        assert len(given.get("note", "")) <= 3
        assert isinstance(given.get("sure", True), bool)
        assert given.get("where", {}) in ({}, {"x": None})
    elif name == "add":
        assert all(isinstance(n, int) for n in given["n"])
        assert len(given["n"]) <= 3


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(4)
def test_a_call_that_is_required_comes(name: str, special: bool) -> None:
    found, _, _ = known(name, special=special)
    seen: set[tuple[str, int, bool]] = set()
    for seed in range(16):
        choice: Any = ["required", NAMED][seed % 2]
        how = {
            "parallel": seed % 4 < 2,
            "starts_in_reasoning": seed % 3 == 0 and found.thought is not None,
        }
        grammar = found.settings(TOOLS, choice, **how)["grammar"]
        text = walked(name, grammar, seed, special=special)
        if text is None:
            continue
        parts = read(found.parser(TOOLS, choice, **how), text)
        calls = calls_in(parts)
        assert calls, text
        assert text_of(parts) == "", text
        assert how["parallel"] or len(calls) == 1
        for called, arguments, whole in calls:
            assert whole
            assert choice == "required" or called == "book"
            check(called, arguments)
        seen.add((calls[0][0], len(calls), any(isinstance(p, Reasoning) for p in parts)))
    assert {called for called, _, _ in seen} >= {"book", "now"}
    assert name == "harmony" or max(count for _, count, _ in seen) > 1
    assert {thought for _, _, thought in seen} >= {found.thought is not None}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(4)
def test_calls_of_strict_tools_keep_to_their_schemas(name: str, special: bool) -> None:
    found, made, vocabulary = known(name, special=special)
    assert "grammar" not in found.settings(TOOLS)
    called = 0
    for seed in range(16):
        how = {"parallel": seed % 4 < 2}
        grammar = found.settings(STRICT, **how)["grammar"]
        text = walked(name, grammar, seed, special=special)
        if text is None:
            continue
        parts = read(found.parser(STRICT, **how), text)
        for one, arguments, whole in calls_in(parts):
            assert whole
            check(one, arguments)
            called += 1
    assert called > 3
    heads = {"harmony": "<|channel|>final<|message|>"}
    grammar = found.settings(STRICT)["grammar"]
    for text in ("Hello", "It is {now}.\n", "é [1]"):
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        ids = made(heads.get(name, "") + text, add_special_tokens=False)["input_ids"]
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_are_asked_for_where_they_are_marks(name: str) -> None:
    plain, _, _ = known(name, special=False)
    assert plain.special == {}
    assert plain.settings(TOOLS) == {"tools": TOOLS}
    assert plain.settings(TOOLS, "none") == plain.settings() == {}
    own, made, _ = known(name, special=True)
    if own.special:
        assert own.settings(TOOLS) == {"tools": TOOLS, "skip_special_tokens": False}
        for mark, number in own.special.items():
            assert made.convert_tokens_to_ids(mark) == number
    assert bool(own.special) == (name != "pythonic")
    assert bool(own.settings()) == (name in ("hermes", "deepseek_bare", "harmony"))


@pytest.mark.parametrize(
    ("tools", "choice", "why"),
    [
        (TOOLS, "maybe", "tool_choice must be 'auto'"),
        (TOOLS, {"type": "function"}, "tool_choice must be like"),
        (TOOLS, {"type": "function", "function": {"name": "no"}}, "names 'no', which is none"),
        ([], "required", "there are no tools"),
        (None, NAMED, "there are no tools"),
        ([{"type": "web_search"}], "auto", r"tools\[0\] must be like"),
        ([3], "auto", r"tools\[0\] must be like"),
        ([tool("a b")], "auto", r"tools\[0\].function.name must have"),
        ([tool("a"), tool("a")], "auto", r"tools\[1\]: there are two functions 'a'"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], "auto", "strict must be"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "auto", "JSON sch"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
         "auto", "schema of an object"),
    ],
)  # fmt: skip
def test_what_is_no_tool_or_choice_is_named(tools: Any, choice: Any, why: str) -> None:
    for act in (form("hermes").settings, form("hermes").parser):
        with pytest.raises(SettingsError, match=why):
            act(tools, choice)


def test_tools_are_refused_where_the_form_is_not_known() -> None:
    made = of_bytes("hermes", special=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer)
    for template in (None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"):
        plain.chat_template = template
        found = format_of(plain)
        assert (found.name, found.thought, found.special) == (None, None, {})
        with pytest.raises(PromptError, match=r"of M writes tool calls in no form.*Hermes"):
            found.settings(TOOLS, model="M")
        assert found.settings(TOOLS, "none", model="M") == {}
        assert text_of(read(found.parser(), "<think>a")) == "<think>a"


OTHERWISE = [
    ("hermes", "<tool_call>", "<call>"),
    ("hermes", "</tool_call>", "</call>"),
    ("hermes", '"arguments"', '"args"'),
    ("hermes", '"name"', '"function"'),
    ("hermes", "<tool_call>\\n", "<calls><tool_call>\\n"),
    ("llama", '"parameters"', '"arguments"'),
    ("llama", """'{"name": "'""", """'<call>{"name": "'"""),
    ("mistral", "[TOOL_CALLS]", "[CALLS]"),
    ("mistral_named", "[ARGS]", "[WITH]"),
    ("pythonic", "+ '=' +", "+ ':' +"),
    ("coder", "<parameter=", "<param="),
    ("coder", "<function=", "<f="),
    ("deepseek", "<｜tool▁sep｜>", "<｜sep｜>"),
    ("deepseek_bare", "<｜tool▁call▁end｜>", "<｜end｜>"),
    ("harmony", "<|message|>", "<|text|>"),
    ("harmony", "functions.", "tools."),
]


@pytest.mark.parametrize(("name", "before", "after"), OTHERWISE)
def test_a_form_that_only_resembles_one_is_not_known(name: str, before: str, after: str) -> None:
    """It would be read as something else, or never."""
    template = TEMPLATES[name].replace(before, after)
    assert template != TEMPLATES[name]
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes(name, special=False).backend_tokenizer, eos_token="<eos>"
    )
    made.chat_template = TEMPLATES[name]
    assert format_of(made).name in KNOWN
    made.chat_template = template
    assert format_of(made).name is None


@pytest.mark.parametrize(
    ("template", "thought", "variables"),
    [
        ("hermes", ("<think>", "</think>"), [(None, False), ({"enable_thinking": False}, False)]),
        ("deepseek_bare", ("<think>", "</think>"), [(None, False), ({"thinking": True}, True)]),
        ("llama", None, [(None, False)]),
    ],
)
def test_where_an_answer_begins_inside_of_a_thought(
    template: str, thought: Any, variables: list[Any]
) -> None:
    found = form(template)
    assert found.thought == thought
    for said, opened in variables:
        assert found.starts_in_reasoning(said) == opened
    assert found.starts_in_reasoning(continued="<think>\nHm") == (thought is not None)
    assert not found.starts_in_reasoning(continued="<think>\nHm</think> So")


SPLIT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>') | last }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OPENED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
    "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}{% endfor %}"
)
OTHER_THOUGHTS = {
    "only dropped": (SPLIT, ("<think>", "</think>")),
    "only opened": (OPENED, ("<think>", "</think>")),
    "other marks": (BRACKETS, ("[THINK]", "[/THINK]")),
}


@pytest.mark.parametrize("what", OTHER_THOUGHTS)
def test_marks_of_thoughts_are_found_in_the_template(what: str) -> None:
    template, thought = OTHER_THOUGHTS[what]
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes("llama", special=False).backend_tokenizer
    )
    made.chat_template = template
    found = format_of(made)
    assert found.thought == thought
    assert found.starts_in_reasoning() == (what == "only opened")


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_are_given_to_a_template_as_it_reads_them(name: str) -> None:
    for given in ('{"city": "é"}', {"city": "é"}):
        call = {"id": "a" * 9, "type": "function", "function": {"name": "f", "arguments": given}}
        chat = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        (_, said) = form(name).messages(chat)
        assert chat[1]["tool_calls"] == [call]
        text = of_bytes(name, special=False).apply_chat_template([chat[0], said], tokenize=False)
        assert "é" in text
        assert '\\"' not in text
    bad = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]
    if not form(name)._as_text:
        with pytest.raises(PromptError, match="message 0: the arguments of a call are an object"):
            form(name).messages(bad)
    assert form(name).messages([3, {"role": "user"}, {"tool_calls": [3]}]) == [
        3, {"role": "user"}, {"content": None, "tool_calls": [3]},
    ]  # fmt: skip


def test_an_engine_calls_a_tool() -> None:
    """The small model inside the package, which never learned to, is confined to a call."""
    with jackfield.load("demo") as plain:
        tokenizer = plain.tokenizer
    tokenizer.chat_template = TEMPLATES["coder"]
    found = format_of(tokenizer)
    chat = [{"role": "user", "content": "Hi"}]
    for strict in (False, True):
        tools = [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": {
            "properties": {"n": {"enum": [1, 20]}}, "required": ["n"],
            "additionalProperties": False}}}]  # fmt: skip
        with jackfield.load("demo", tokenizer=tokenizer) as engine:
            asked = found.settings(tools, "required", parallel=False)
            parser = found.parser(tools, "required", parallel=False)
            parts = []
            for delta in engine.stream(chat, max_new_tokens=100, **asked):
                parts += parser.push(delta.text)
            parts += parser.finish()
            ((name, arguments, whole),) = calls_in(merged(parts))
            assert (name, whole) == ("f", True)
            assert json.loads(arguments) in ({"n": 1}, {"n": 20})


ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["free", "strict"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(4)
def test_an_answer_by_a_schema_or_calls(name: str, tools: Any, special: bool) -> None:
    found, _, _ = known(name, special=special)
    answers = called = 0
    for seed in range(24):
        how = {
            "parallel": seed % 4 < 2,
            "starts_in_reasoning": seed % 3 == 0 and found.thought is not None,
        }
        grammar = found.settings(tools, "auto", **how, answer=ANSWER)["grammar"]
        text = walked(name, grammar, seed, special=special)
        if text is None:
            continue
        parts = read(found.parser(tools, "auto", **how), text)
        calls = calls_in(parts)
        if said := text_of(parts):
            answers += 1
            if name != "harmony":  # which may say a word before it calls
                assert not calls, text
            if not calls:
                assert json.loads(said).keys() == {"sum"}, text
        else:
            assert calls, text
        for one, arguments, whole in calls:
            assert whole
            called += 1
            if tools is STRICT:
                check(one, arguments)
    assert called
    assert answers
