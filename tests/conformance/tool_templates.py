"""Chat templates in the shapes of published ones, written here: how tools and calls stand there."""

from __future__ import annotations

from typing import Any

from families import character_tokenizer

HERMES = """
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
  {{- 'You may call these functions, inside of <tools></tools>:\\n<tools>' }}
  {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
  {{- '\\n</tools>\\nA call is written <tool_call>\\n{"name": <name>, "arguments": <object>}\\n' }}
  {{- '</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if m.reasoning_content and loop.last %}
      {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
      {%- if loop.index0 or m.content %}{{- '\\n' }}{%- endif %}
      {%- if call.function %}{%- set call = call.function %}{%- endif %}
      {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
      {{- (call.arguments if call.arguments is string else call.arguments | tojson) }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}"""

LLAMA = """
{%- set date_string = date_string | default('26 Jul 2024') %}
{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- set shown = namespace(tools=tools) %}
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string }}
{%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content }}{%- endif %}
{%- if tools is not none and not tools_in_user_message %}
  {%- for t in tools %}{{- '\\n' + (t | tojson(indent=4)) }}{%- endfor %}
  {%- set shown.tools = none %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}
      {{- raise_exception('one call at a time') }}
    {%- endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {{- '<|eot_id|>' }}
  {%- elif m.role in ('tool', 'ipython') %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
  {%- elif not (loop.first and m.role == 'system') %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.role == 'user' and shown.tools is not none %}
      {%- for t in shown.tools %}{{- (t | tojson(indent=4)) + '\\n' }}{%- endfor %}
      {%- set shown.tools = none %}
    {%- endif %}
    {{- m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA_4 = LLAMA.replace(
    """{{- '{"name": "'""", """{{- '<|python_start|><|python_end|>{"name": "'"""
)

_MISTRAL = """
{{- bos_token }}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if tools is not none and m == last %}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT] ' + m.content + '[/SYSTEM_PROMPT]' }}
  {%- elif m.role == 'assistant' and m.tool_calls %}
    CALLS
    {{- eos_token }}
  {%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
  {%- elif m.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' + m.tool_call_id + '"}' }}
    {{- '[/TOOL_RESULTS]' }}
  {%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}
      {%- if call.id is not defined or call.id | length != 9 %}
        {{- raise_exception('ids of calls have nine letters and digits') }}
      {%- endif %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
      {{- ', ' if not loop.last else ']' }}
    {%- endfor %}""",
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    """{%- for call in m.tool_calls %}
      {%- set given = call.function.arguments %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
      {{- given if given is string else given | tojson }}
    {%- endfor %}""",
)
MISTRAL_IDS = MISTRAL_NAMED.replace("+ '[ARGS]' }}", "+ '[CALL_ID]' + call.id + '[ARGS]' }}")

_TURNS = """
{{- bos_token }}
{%- if tools %}{{- '<|system|>' ~ (tools | tojson) ~ '\\n' }}{%- endif %}
{%- for m in messages %}
  {{- '<|' + m.role + '|>' }}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {{- m.content or '' }}
    CALLS
  {%- elif m.content %}{{- m.content }}{%- endif %}
  {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
PYTHONIC = _TURNS.replace(
    "CALLS",
    """{{- '[' }}
    {%- for call in m.tool_calls %}
      {{- call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
      {%- endfor %}
      {{- ')' + (', ' if not loop.last else '') }}
    {%- endfor %}
    {{- ']' }}""",
)
PYTHONIC_MARKED = PYTHONIC.replace("{{- '[' }}", "{{- '<|tool_call_start|>[' }}").replace(
    "{{- ']' }}", "{{- ']<|tool_call_end|>' }}"
)
CODER = _TURNS.replace(
    "CALLS",
    """{%- for call in m.tool_calls %}
      {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- '<parameter=' + key + '>\\n' }}
        {{- value if value is string else value | tojson }}
        {{- '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
    {%- endfor %}""",
)
DEEPSEEK = _TURNS.replace(
    "CALLS",
    """{{- '<｜tool▁calls▁begin｜>' }}
    {%- for call in m.tool_calls %}
      {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
      {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
      {{- '\\n' if not loop.last }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜>' }}""",
)
DEEPSEEK_BARE = (
    _TURNS.replace(
        "CALLS",
        """{{- '<｜tool▁calls▁begin｜>' }}
    {%- for call in m.tool_calls %}
      {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
      {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜>' }}""",
    )
    .replace(
        "{%- elif m.content %}",
        "{%- elif m.role == 'assistant' %}{{- '</think>' + m.content.split('</think>') | last }}"
        "{%- elif m.content %}",
    )
    .replace(
        "{{- '<|assistant|>' }}", "{{- '<|assistant|>' + ('<think>' if thinking else '</think>') }}"
    )
)
DEEPSEEK_BARE = DEEPSEEK_BARE.replace(
    "{{- m.content or '' }}", "{{- '</think>' ~ (m.content or '') }}"
)
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '\\nValid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
  {{- '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
  {%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = any;' }}{%- endfor %}
  {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(called='') %}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- if m.content %}
      {{- '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
    {%- if m.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {%- set call = m.tool_calls[0].function %}
    {%- set ns.called = call.name %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson }}{{- '<|call|>' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- m.content + '<|end|>' }}
  {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
    "mistral_ids": MISTRAL_IDS,
    "pythonic": PYTHONIC,
    "pythonic_marked": PYTHONIC_MARKED,
    "llama_4": LLAMA_4,
    "coder": CODER,
    "deepseek": DEEPSEEK,
    "deepseek_bare": DEEPSEEK_BARE,
    "harmony": HARMONY,
}


def with_template(template: str) -> Any:
    """A tokenizer of characters that has this chat template."""
    made = character_tokenizer()
    made.chat_template = template
    return made


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function tool, all of whose arguments are required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    described = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": described}
