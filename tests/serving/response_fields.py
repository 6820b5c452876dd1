"""What each field of ``/v1/responses`` does here: data for `test_fields.py`."""

# ruff: noqa: E501, ISC004
from __future__ import annotations

from typing import Any

from fields import NOW, SCHEMA, SEEDED, USER, Differs, Json, Refused, Same, Shown, rows

TELLS = "test_response_tools.py::test_what_came_of_a_call_goes_on_as_in_the_chat"
NAMES = "test_response_tools.py::test_choices_of_tools"
CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
SPOKEN = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Yes"}],
}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
LOGPROBS = "message.output_text.logprobs"
UNREAD = ["file_search_call", "computer_call", "computer_call_output", "web_search_call", "tool_search_call", "tool_search_output", "configuration_update", "compaction", "image_generation_call", "code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "custom_tool_call_output", "custom_tool_call", "compaction_trigger", "program", "program_output"]  # fmt: skip
UNSERVED = ["file_search", "computer", "computer_use_preview", "mcp", "code_interpreter", "programmatic_tool_calling", "image_generation", "local_shell", "shell", "custom", "namespace", "tool_search", "apply_patch"]  # fmt: skip
MARKED = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}


def items(*found: Json) -> Json:
    return {"input": list(found)}


def content(kind: str, **more: Any) -> Json:
    return items({"role": "user", "content": [{"type": kind, **more}]})


def spoken(**more: Any) -> Json:
    return items(USER, {**SPOKEN, "content": [SPOKEN["content"][0] | more]}, USER)  # type: ignore[operator]


def called(call: Json | None = None, result: Json | None = None) -> Json:
    return items(USER, CALL | (call or {}), RESULT | (result or {}))


def thought(**more: Any) -> Json:
    return items(USER, THOUGHT | more, SPOKEN, USER)


def tool(**more: Any) -> Json:
    return {"tools": [{"type": "function", **NOW, **more}]}


def formed(**more: Any) -> Json:
    return {"text": {"format": more}}


RESPONSES = rows([
    ("access_programs access_programs.cyber", Same({"access_programs": {"cyber": "standard"}})),
    ("access_programs.cyber", Refused({"access_programs": {"cyber": "daybreak_red"}})),
    ("background", Same({"background": False})),
    ("background", Refused({"background": True})),
    ("background_options background_options.completion_window", Same({"background_options": {"completion_window": "soonest"}})),
    ("background_options.completion_window", Refused({"background_options": {"completion_window": "2h"}})),
    ("background_options.continuation_id", Refused({"background_options": {"continuation_id": "a"}})),
    ("context_management", Refused({"context_management": [{"type": "compaction"}]})),
    ("conversation", Refused({"conversation": "conv_1"})),
    ("image image.context_compression", Same({"image": {"context_compression": "disabled"}})),
    ("image.context_compression", Refused({"image": {"context_compression": "enabled"}})),
    ("include", Differs({"include": [LOGPROBS]})),
    ("include", Same({"include": ["file_search_call.results"]})),
    ("include", Refused({"include": ["reasoning.encrypted_content"]})),
    ("input", Differs({"input": "Bye"})),
    ("input[message] input[message].content", Differs(items({**USER, "content": "Bye"}))),
    ("input[message].content[input_text] input[message].content[input_text].text",
     Same(content("input_text", text="Hello"), items(USER))),
    ("input[message].content[input_text].prompt_cache_breakpoint",
     Refused(items({"role": "user", "content": [MARKED]}), "input.content.prompt_cache_breakpoint")),
    ("input[message].content[input_image]", Refused(content("input_image", image_url="x"), "input.content")),
    ("input[message].content[input_file]", Refused(content("input_file", file_id="x"), "input.content")),
    ("input[message].role", Differs(items({**USER, "role": "developer"}, USER), items(USER, USER))),
    ("input[message].phase", Refused(items({**USER, "phase": "commentary"}), "input.phase")),
    ("input[message].status", Same(items({**USER, "status": "completed"}), items(USER))),
    ("input[assistant] input[assistant].content input[assistant].content[output_text] input[assistant].content[output_text].text",
     Differs(spoken(text="No, never, not at all"), spoken())),
    ("input[assistant].content[output_text].annotations", Same(spoken(annotations=[]), spoken())),
    ("input[assistant].content[output_text].annotations",
     Refused(spoken(annotations=[{"type": "file_path"}]), "input.content.annotations", whole=True)),
    ("input[assistant].content[output_text].logprobs", Same(spoken(logprobs=[{"token": "a"}]), spoken(), whole=True)),
    ("input[assistant].content[refusal]",
     Refused(items({**SPOKEN, "content": [{"type": "refusal", "refusal": "No"}]}), "input.content")),
    ("input[assistant].id input[assistant].status",
     Same(items(USER, {**SPOKEN, "id": "msg_1", "status": "completed"}, USER), items(USER, SPOKEN, USER))),
    ("input[assistant].phase", Refused(items({**SPOKEN, "phase": "final_answer"}), "input.phase")),
    ("input[function_call]", Shown(TELLS)),
    ("input[function_call].name", Differs(called({"name": "then"}), called())),
    ("input[function_call].arguments", Differs(called({"arguments": '{"a": 1}'}), called())),
    ("input[function_call].call_id input[function_call_output].call_id",
     Refused(called({"call_id": "other"}), "input.call_id")),
    ("input[function_call].id input[function_call].status", Same(called({"id": "fc_1", "status": "completed"}), called())),
    ("input[function_call].async", Same(called({"async": False}), called())),
    ("input[function_call].async", Refused(called({"async": True}), "input.async")),
    ("input[function_call].caller", Same(called({"caller": {"type": "direct"}}), called())),
    ("input[function_call].caller[direct]", Same(called({"caller": {"type": "direct"}}), called())),
    ("input[function_call].caller[program]",
     Refused(called({"caller": {"type": "program", "caller_id": "a"}}), "input.caller.type")),
    ("input[function_call].namespace", Refused(called({"namespace": "a"}), "input.namespace")),
    ("input[function_call_output]", Shown(TELLS)),
    ("input[function_call_output].output", Differs(called(result={"output": "night"}), called())),
    ("input[function_call_output].output[input_text] input[function_call_output].output[input_text].text",
     Same(called(result={"output": [{"type": "input_text", "text": "noon"}]}), called())),
    ("input[function_call_output].output[input_text].prompt_cache_breakpoint",
     Refused(called(result={"output": [MARKED]}), "input.output.prompt_cache_breakpoint")),
    ("input[function_call_output].output[input_image]",
     Refused(called(result={"output": [{"type": "input_image"}]}), "input.output")),
    ("input[function_call_output].output[input_file]",
     Refused(called(result={"output": [{"type": "input_file"}]}), "input.output")),
    ("input[function_call_output].id input[function_call_output].status",
     Same(called(result={"id": "a", "status": "completed"}), called())),
    ("input[function_call_output].caller input[function_call_output].caller[direct]",
     Same(called(result={"caller": {"type": "direct"}}), called())),
    ("input[function_call_output].caller[program]",
     Refused(called(result={"caller": {"type": "program", "caller_id": "a"}}), "input.caller.type")),
    ("input[function_call_output].name", Same(called(result={"name": "now"}), called())),
    ("input[function_call_output].name", Refused(called(result={"name": "other"}), "input")),
    ("input[function_call_output].namespace", Refused(called(result={"namespace": "a"}), "input.namespace")),
    ("input[developer]", Refused(items({"type": "additional_tools", "role": "developer", "tools": []}), "input")),
    ("input[reasoning] input[reasoning].content input[reasoning].content[reasoning_text] "
     "input[reasoning].content[reasoning_text].text", Shown(TELLS)),
    ("input[reasoning].id input[reasoning].status", Same(thought(id="rs_1", status="completed"), thought())),
    ("input[reasoning].summary", Refused(thought(summary=[{"type": "summary_text", "text": "a"}]), "input.summary")),
    ("input[reasoning].encrypted_content", Refused(thought(encrypted_content="x"), "input.encrypted_content")),
    ("input[item_reference] input[item_reference].id", Shown("test_responses.py::test_an_item_is_referred_to_by_its_id")),
    *((f"input[{kind}]", Refused(items({"type": kind}), "input")) for kind in UNREAD),
    ("instructions", Differs({"instructions": "Be brief."})),
    ("max_output_tokens", Differs({"max_output_tokens": 3})),
    ("max_tool_calls", Same({"max_tool_calls": 1})),  # of tools that a server runs
    ("metadata", Shown("test_responses.py::test_a_stored_response_is_had_again_until_it_is_deleted")),
    ("model", Refused({"model": "other"}, status=404)),
    ("moderation", Refused({"moderation": {"model": "m"}})),
    ("parallel_tool_calls", Shown(NAMES)),
    ("previous_response_id", Shown("test_responses.py::test_three_turns_are_the_chat_of_three_turns")),
    ("previous_response_id", Refused({"previous_response_id": "resp_none"})),
    ("prompt", Refused({"prompt": {"id": "p"}})),
    ("prompt_cache_key", Shown("test_responses.py::test_tokens_that_the_cache_had_are_counted")),
    ("prompt_cache_options prompt_cache_options.mode prompt_cache_options.prewarm",
     Same({"prompt_cache_options": {"mode": "implicit", "prewarm": False}})),
    ("prompt_cache_options.mode", Refused({"prompt_cache_options": {"mode": "explicit"}})),
    ("prompt_cache_options.prewarm", Refused({"prompt_cache_options": {"prewarm": True}})),
    ("prompt_cache_options.ttl", Refused({"prompt_cache_options": {"ttl": "30m"}})),
    ("prompt_cache_options.comparison_response_id", Refused({"prompt_cache_options": {"comparison_response_id": "a"}})),
    ("prompt_cache_retention", Same({"prompt_cache_retention": "in_memory"})),
    ("prompt_cache_retention", Refused({"prompt_cache_retention": "24h"})),
    ("reasoning reasoning.effort", Differs({"reasoning": {"effort": "none"}})),
    ("reasoning.context reasoning.mode", Same({"reasoning": {"context": "auto", "mode": "standard"}})),
    ("reasoning.context", Refused({"reasoning": {"context": "all_turns"}})),
    ("reasoning.mode", Refused({"reasoning": {"mode": "pro"}})),
    ("reasoning.summary", Refused({"reasoning": {"summary": "auto"}})),
    ("reasoning.generate_summary", Refused({"reasoning": {"generate_summary": "auto"}})),
    ("safety_identifier user", Shown("test_responses.py::test_a_stored_response_is_had_again_until_it_is_deleted")),
    ("service_tier", Same({"service_tier": "auto"})),
    ("service_tier", Refused({"service_tier": "priority"})),
    ("store", Shown("test_responses.py::test_what_is_not_to_be_stored_is_not")),
    ("stream", Shown("test_responses.py::test_the_last_event_has_what_is_answered_whole")),
    ("stream_options", Shown("test_responses.py::test_the_bytes_of_a_stream")),
    ("stream_options", Refused({"stream_options": {}})),
    ("stream_options.include_obfuscation", Refused({"stream": True, "stream_options": {"include_obfuscation": True}})),
    ("temperature", Differs(SEEDED, {"seed": 5})),
    ("text text.format text.format[json_object]", Differs(formed(type="json_object"))),
    ("text.format[text]", Same(formed(type="text"))),
    ("text.format[json_schema] text.format[json_schema].schema",
     Differs(formed(type="json_schema", name="n", schema=SCHEMA))),
    ("text.format[json_schema].name text.format[json_schema].description text.format[json_schema].strict",
     Same(formed(type="json_schema", name="m", description="d", strict=True, schema=SCHEMA),
          formed(type="json_schema", name="n", schema=SCHEMA))),
    ("text.verbosity", Same({"text": {"verbosity": "medium"}})),
    ("text.verbosity", Refused({"text": {"verbosity": "high"}})),
    ("tool_choice tool_choice[function] tool_choice[function].name tool_choice[allowed_tools] "
     "tool_choice[allowed_tools].mode tool_choice[allowed_tools].tools", Shown(NAMES)),
    ("tool_choice[mcp]", Refused({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice.type")),
    ("tool_choice[custom]", Refused({"tool_choice": {"type": "custom", "name": "a"}}, "tool_choice.type")),
    *((f"tool_choice[{kind}]", Refused({"tool_choice": {"type": kind}}, "tool_choice.type"))
      for kind in ("programmatic_tool_calling", "apply_patch", "shell")),
    ("tool_choice.type", Refused({"tool_choice": {"type": "file_search"}})),
    ("tools tools[function]", Differs(tool())),
    ("tools[function].name", Differs(tool(name="then"), tool())),
    ("tools[function].description", Differs(tool(description="The time."), tool())),
    ("tools[function].parameters", Differs(tool(parameters=SCHEMA), tool())),
    ("tools[function].strict", Shown("test_tool_choice.py::test_calls_of_strict_tools_keep_to_their_schemas")),
    ("tools[function].async tools[function].allowed_callers tools[function].defer_loading",
     Same(tool(**{"async": False, "allowed_callers": ["direct"], "defer_loading": False}), tool())),
    ("tools[function].async", Refused(tool(**{"async": True}), "tools.async")),
    ("tools[function].allowed_callers", Refused(tool(allowed_callers=["programmatic"]), "tools.allowed_callers")),
    ("tools[function].defer_loading", Refused(tool(defer_loading=True), "tools.defer_loading")),
    ("tools[function].output_schema", Refused(tool(output_schema={}), "tools.output_schema")),
    *((f"tools[{kind}]", Refused({"tools": [{"type": kind}]}, "tools.type")) for kind in UNSERVED),
    # those of searches, which have several types
    ("tools.type", Refused({"tools": [{"type": "web_search"}]})),
    ("tools.external_web_access tools.filters tools.search_context_size tools.user_location tools.search_content_types",
     Refused({"tools": [{"type": "web_search"}]}, "tools.type")),
    ("top_logprobs", Differs({"top_logprobs": 2, "include": [LOGPROBS]}, {"include": [LOGPROBS]})),
    ("top_logprobs", Refused({"top_logprobs": 2})),
    ("top_p", Differs({"top_p": 0.01}, SEEDED)),
    ("truncation", Same({"truncation": "disabled"})),
    ("truncation", Refused({"truncation": "auto"})),
])  # fmt: skip
