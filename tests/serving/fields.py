"""What each field of the client's parameters does here: data for `test_fields.py`.

A path is that of a field, with the kind of an alternative in brackets. Where all below a path is
refused, what is below has no row.
"""

# ruff: noqa: E501, ISC004
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Differs:
    """The answer to `base` and `more` is another than that to `base`."""

    more: Json
    base: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Same:
    """It asks for nothing: the answer to `base` and `more` is that to `base`.

    Neither does what is below, where it is `whole`.
    """

    more: Json
    base: Json = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class Refused:
    """A 400 by `param`, which is the path where it is not given.

    All below is refused, too, where nothing of the path is accepted, or this is `whole`.
    """

    more: Json
    param: str | None = None
    status: int = 400
    whole: bool = False


@dataclass(frozen=True)
class Shown:
    """It takes effect, as a test shows that stands elsewhere."""

    test: str


Row = Differs | Same | Refused | Shown
Table = dict[str, list[Row]]


def rows(table: Iterable[tuple[str, Row]]) -> Table:
    """A table of paths; several paths may stand in one row, and one path in several."""
    found: Table = {}
    for paths, row in table:
        for path in paths.split():
            found.setdefault(path, []).append(row)
    return found


SCHEMA = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
THREE = {"regex": "one two three"}
SEEDED = {"temperature": 1.5, "seed": 5}
NOW = {"name": "now", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "Hello"}


def said(*messages: Json) -> Json:
    return {"messages": list(messages)}


def chat_tool(**more: Any) -> Json:
    return {"tools": [{"type": "function", "function": NOW | more}]}


def called(**more: Any) -> Json:
    call: Json = {"id": "call_1", "type": "function",
                  "function": {"name": "now", "arguments": "{}"} | more.pop("function", {})}  # fmt: skip
    told = {"role": "assistant", "content": "", "tool_calls": [call | more]}
    return said(USER, told, {"role": "tool", "tool_call_id": "call_1", "content": "noon"})


def part(kind: str, **more: Any) -> Json:
    return said({"role": "user", "content": [{"type": kind, **more}]})


BREAKPOINT = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}

CHAT = rows([
    ("messages messages[user] messages[user].content", Differs(said({**USER, "content": "Bye"}))),
    ("messages[user].content[text] messages[user].content[text].text",
     Same(said({"role": "user", "content": [{"type": "text", "text": "Hello"}]}), said(USER))),
    *((f"messages[{role}] messages[{role}].content", Differs(said({"role": role, "content": "a"}, USER), said(USER)))
      for role in ("developer", "system")),
    *((f"messages[{role}].content[text] messages[{role}].content[text].text",
       Same(said({"role": role, "content": [{"type": "text", "text": "a"}]}, USER), said({"role": role, "content": "a"}, USER)))
      for role in ("developer", "system", "assistant")),
    *((f"messages[{role}].content[text].prompt_cache_breakpoint",
       Refused(said({"role": role, "content": [BREAKPOINT]}, USER), "messages.content.prompt_cache_breakpoint"))
      for role in ("developer", "system", "user", "assistant", "tool")),
    *((f"messages[{role}].name", Refused(said({"role": role, "name": "ann", "content": "a"}, USER), "messages"))
      for role in ("developer", "system", "user", "assistant")),  # the template does not read it
    ("messages[user].content[image_url] messages[user].content[image_url].image_url messages[user].content[image_url].image_url.url",
     Shown("test_images.py::test_images_of_messages_are_read")),
    ("messages[user].content[image_url].prompt_cache_breakpoint",
     Refused(part("image_url", image_url={"url": "data:"}, prompt_cache_breakpoint={"mode": "explicit"}), "messages.content.prompt_cache_breakpoint")),
    ("messages[user].content[image_url].image_url.detail",
     Refused(part("image_url", image_url={"url": "data:", "detail": "high"}), "messages.content.image_url.detail")),
    ("messages[user].content[input_audio]", Refused(part("input_audio", input_audio={}), "messages.content.type")),
    ("messages[user].content[file]", Refused(part("file", file={}), "messages.content.type")),
    ("messages[assistant] messages[assistant].content",
     Differs(said(USER, {"role": "assistant", "content": "Yes"}, USER), said(USER, {"role": "assistant", "content": "No, never, not at all"}, USER))),
    ("messages[assistant].audio", Refused(said(USER, {"role": "assistant", "audio": {"id": "a"}}), "messages.audio")),
    ("messages[assistant].content[refusal]",
     Refused(said({"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}), "messages.content.type")),
    ("messages[assistant].function_call",
     Refused(said({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}), "messages.function_call")),
    ("messages[assistant].refusal", Refused(said({"role": "assistant", "refusal": "No"}), "messages.refusal")),
    ("messages[assistant].tool_calls messages[assistant].tool_calls[function] messages[assistant].tool_calls[function].function",
     Differs(called(), said(USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "noon"}))),
    ("messages[assistant].tool_calls[function].function.name", Differs(called(function={"name": "then"}), called())),
    ("messages[assistant].tool_calls[function].function.arguments",
     Differs(called(function={"arguments": '{"a": 1}'}), called())),
    ("messages[assistant].tool_calls[function].id messages[tool].tool_call_id",
     Shown("test_tools.py::test_what_came_of_a_call_is_read")),
    ("messages[assistant].tool_calls[custom]",
     Refused(said({"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}), "messages.tool_calls.type")),
    ("messages[tool] messages[tool].content messages[tool].content[text] messages[tool].content[text].text",
     Shown("test_fields.py::test_results_of_tools_are_read")),
    ("messages[function]", Refused(said({"role": "function", "name": "f", "content": "x"}), "messages.role")),
    ("model", Refused({"model": "other"}, status=404)),
    ("audio", Refused({"audio": {"format": "wav", "voice": "ash"}})),
    ("frequency_penalty", Differs({"frequency_penalty": 2, "max_completion_tokens": 60}, {"max_completion_tokens": 60})),
    ("presence_penalty", Differs({"presence_penalty": 2, "max_completion_tokens": 60}, {"max_completion_tokens": 60})),
    ("function_call", Refused({"function_call": "auto"})),
    ("functions", Refused({"functions": [NOW]})),
    ("logit_bias", Differs({"logit_bias": {"65": 100}})),
    ("logprobs", Differs({"logprobs": True})),
    ("top_logprobs", Differs({"logprobs": True, "top_logprobs": 2}, {"logprobs": True})),
    ("top_logprobs", Refused({"top_logprobs": 2})),
    ("max_completion_tokens", Differs({"max_completion_tokens": 3})),
    ("max_tokens", Differs({"max_tokens": 3, "max_completion_tokens": None})),
    ("metadata", Same({"metadata": {"a": "b"}})),
    ("modalities", Same({"modalities": ["text"]})),
    ("modalities", Refused({"modalities": ["audio"]})),
    ("moderation", Refused({"moderation": {"model": "m"}})),
    ("n", Differs({"n": 2}, SEEDED)),
    ("parallel_tool_calls", Shown("test_tools.py::test_calls_at_once_have_ids_and_numbers_of_their_own")),
    ("prediction", Refused({"prediction": {"type": "content", "content": "x"}})),
    ("prompt_cache_key", Shown("test_responses.py::test_tokens_that_the_cache_had_are_counted")),
    ("prompt_cache_options prompt_cache_options.mode", Same({"prompt_cache_options": {"mode": "implicit"}})),
    ("prompt_cache_options.mode", Refused({"prompt_cache_options": {"mode": "explicit"}})),
    ("prompt_cache_options.ttl", Refused({"prompt_cache_options": {"ttl": "30m"}})),
    ("prompt_cache_retention", Same({"prompt_cache_retention": "in_memory"})),
    ("prompt_cache_retention", Refused({"prompt_cache_retention": "24h"})),
    ("reasoning_effort", Differs({"reasoning_effort": "none"})),
    ("response_format response_format[json_object]",
     Differs({"response_format": {"type": "json_object"}})),
    ("response_format[text]", Same({"response_format": {"type": "text"}})),
    ("response_format[json_schema] response_format[json_schema].json_schema response_format[json_schema].json_schema.schema",
     Differs({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}})),
    ("response_format[json_schema].json_schema.name response_format[json_schema].json_schema.description "
     "response_format[json_schema].json_schema.strict",
     Same({"response_format": {"type": "json_schema", "json_schema": {"name": "m", "description": "d", "strict": True, "schema": SCHEMA}}},
          {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}})),
    ("safety_identifier", Same({"safety_identifier": "ann"})),
    ("seed", Differs({"seed": 6}, SEEDED)),
    ("service_tier", Same({"service_tier": "default"})),
    ("service_tier", Refused({"service_tier": "flex"})),
    ("stop", Differs({"stop": "two"}, THREE)),
    ("store", Same({"store": False})),
    ("store", Refused({"store": True})),
    ("stream", Shown("test_completions.py::test_a_stream_is_the_whole_in_pieces")),
    ("stream_options stream_options.include_usage", Shown("test_completions.py::test_usage_comes_in_its_own_last_chunk")),
    ("stream_options", Refused({"stream_options": {"include_usage": True}})),
    ("stream_options.include_obfuscation", Refused({"stream": True, "stream_options": {"include_obfuscation": True}})),
    ("temperature", Differs(SEEDED, {"seed": 5})),
    ("tool_choice", Shown("test_tools.py::test_no_tool_may_be_called_where_none_is_chosen")),
    ("tool_choice[function] tool_choice[function].function tool_choice[function].function.name",
     Shown("test_tools.py::test_the_function_that_is_named_is_called")),
    ("tool_choice[allowed_tools] tool_choice[allowed_tools].allowed_tools "
     "tool_choice[allowed_tools].allowed_tools.mode tool_choice[allowed_tools].allowed_tools.tools",
     Shown("test_tools.py::test_only_tools_that_are_allowed_are_called")),
    ("tool_choice[allowed_tools]",
     Refused({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
             "tool_choice.allowed_tools.tools")),
    ("tool_choice[custom]", Refused({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type")),
    ("tools tools[function] tools[function].function", Differs(chat_tool())),
    ("tools[function].function.name", Differs(chat_tool(name="then"), chat_tool())),
    ("tools[function].function.description", Differs(chat_tool(description="The time."), chat_tool())),
    ("tools[function].function.parameters", Differs(chat_tool(parameters=SCHEMA), chat_tool())),
    ("tools[function].function.strict", Shown("test_tool_choice.py::test_calls_of_strict_tools_keep_to_their_schemas")),
    ("tools[custom]", Refused({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.type")),
    ("top_p", Differs({"top_p": 0.01}, SEEDED)),
    ("user", Same({"user": "ann"})),
    ("verbosity", Same({"verbosity": "medium"})),
    ("verbosity", Refused({"verbosity": "low"})),
    ("web_search_options", Refused({"web_search_options": {}})),
])  # fmt: skip

TEXT = rows([
    ("model", Refused({"model": "other"}, status=404)),
    ("prompt", Differs({"prompt": ["One", "Two"]})),
    ("best_of", Same({"best_of": 1})),
    ("best_of", Refused({"best_of": 3})),
    ("echo", Differs({"echo": True})),
    ("frequency_penalty", Differs({"frequency_penalty": 2, "max_tokens": 60}, {"max_tokens": 60})),
    ("presence_penalty", Differs({"presence_penalty": 2, "max_tokens": 60}, {"max_tokens": 60})),
    ("logit_bias", Differs({"logit_bias": {"65": 100}})),
    ("logprobs", Differs({"logprobs": 1})),
    ("max_tokens", Differs({"max_tokens": 3})),
    ("max_tokens", Refused({"max_tokens": 0})),
    ("n", Differs({"n": 2}, SEEDED)),
    ("seed", Differs({"seed": 6}, SEEDED)),
    ("stop", Differs({"stop": "two"}, THREE)),
    ("stream", Shown("test_fields.py::test_a_stream_of_texts")),
    ("stream_options stream_options.include_usage", Shown("test_fields.py::test_a_stream_of_texts")),
    ("stream_options.include_obfuscation", Refused({"stream": True, "stream_options": {"include_obfuscation": True}})),
    ("suffix", Refused({"suffix": "the end"})),
    ("temperature", Differs(SEEDED, {"seed": 5})),
    ("top_p", Differs({"top_p": 0.01}, SEEDED)),
    ("user", Same({"user": "ann"})),
])  # fmt: skip
