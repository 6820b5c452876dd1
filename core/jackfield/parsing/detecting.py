"""Detects in which form a model writes calls and thoughts, by its own chat template.

A message of the assistant with test calls is rendered, and the text around their names and
arguments is looked up in the table of known forms. The model's name is not used.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jackfield.bridge.chat_templates import THOUGHTS as THOUGHT_KEYS
from jackfield.bridge.chat_templates import ChatTemplate
from jackfield.errors import PromptError
from jackfield.parsing import harmony
from jackfield.parsing.frames import EMPTY, FRAMES, THOUGHTS, Frame
from jackfield.requests.chat_settings import ChatSettings

_ASKED = {"role": "user", "content": "Zq0aqZ"}
_SAID, _THOUGHT = "Zq1sqZ", "Zq2tqZ"
_NAMES = ("Zq3fqZ", "Zq4gqZ")
_KEY, _VALUE = "Zq5kqZ", "Zq6vqZ"
_RESULT = {"role": "tool", "content": "Zq10rqZ", "tool_call_id": "Zq9i0qZ00", "name": _NAMES[0]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "Zq7oqZ",
        "description": "Zq8dqZ",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Probed:
    """The chat template of `tokenizer`, and what it makes of probes; None: it refuses them."""

    def __init__(self, tokenizer: Any) -> None:
        self.there = bool(getattr(tokenizer, "chat_template", None))
        self._tokenizer = tokenizer
        self._reads: dict[tuple[str, bool], bool] = {}

    def rendered(self, *messages: Mapping[str, Any], **asked: Any) -> str | None:
        if not self.there:
            return None
        asked = {"add_generation_prompt": False, **asked}
        try:
            return ChatTemplate(self._tokenizer, ChatSettings(**asked)).render(messages)
        except PromptError:
            return None

    def reads(self, variable: str, *, tools: bool) -> bool:
        """Whether a variable can make a difference, in a chat with tools or in one without."""
        if (variable, tools) not in self._reads:
            told = ChatSettings(
                chat_template_kwargs={variable: True}, tools=[_TOOL] if tools else None
            )
            read = ChatTemplate(self._tokenizer, told).reads_variable(variable, [_ASKED])
            self._reads[variable, tools] = read
        return self._reads[variable, tools]

    @functools.cached_property
    def reads_thoughts(self) -> bool:
        """Whether messages have thoughts that can make a difference."""
        return self.there and ChatTemplate(self._tokenizer).thought_key is not None


def calls_of(probed: Probed) -> tuple[Frame | None, bool, bool]:
    """The frame of calls, whether it is harmony's, and whether arguments must be given as text."""
    before = _heads(probed)
    for as_text, names, content, tools in itertools.product(
        (False, True), (_NAMES, _NAMES[:1]), ("", None), (None, [_TOOL])
    ):
        message = {"role": "assistant", "content": content, "tool_calls": _calls(names, as_text)}
        text = probed.rendered(_ASKED, message, tools=tools)
        if text is None:
            continue
        if _is_harmony(text):
            return None, True, as_text
        for frame in FRAMES:
            if _is_in(frame, text, names, before):
                return frame, False, as_text
    return None, False, False


def _calls(names: Sequence[str], as_text: bool) -> list[dict[str, Any]]:
    arguments: Any = {_KEY: _VALUE}
    given = json.dumps(arguments) if as_text else arguments
    return [
        {"id": f"Zq9i{n}qZ00", "type": "function", "function": {"name": name, "arguments": given}}
        for n, name in enumerate(names)
    ]


def _heads(probed: Probed) -> set[str]:
    """What stands before what an assistant says."""
    found = set()
    for tools in (None, [_TOOL]):
        text = probed.rendered(_ASKED, {"role": "assistant", "content": _SAID}, tools=tools)
        if text is not None and _SAID in text:
            found.add(_bare(text[: text.rindex(_SAID)]))
    return found


def _bare(head: str) -> str:
    """Without white space at its end, and without a thought or code that is empty."""
    head = head.rstrip()
    for opens, closes in (*EMPTY, *THOUGHTS):
        head = head.removesuffix(closes).rstrip().removesuffix(opens).rstrip()
    return head


def _is_in(frame: Frame, text: str, names: Sequence[str], heads: set[str]) -> bool:
    """Whether calls of `names` stand in `text` as the frame says, and nothing else before them."""
    ways = [True, False] if frame.bare and frame.opens else [bool(frame.opens)]
    for marked in ways:
        if match := re.search(_pattern(frame, names, marked), text, re.DOTALL):
            return _bare(text[: match.start()]) in heads
    return False


def _pattern(frame: Frame, names: Sequence[str], marked: bool) -> str:
    parts = [re.escape(frame.opens.strip())] if marked else []
    parts.append(re.escape(frame.first.strip()))
    for n, name in enumerate(names):
        parts += [re.escape(frame.between.strip())] if n else []
        parts += [re.escape(frame.call_opens.strip()), _body(frame, name)]
        parts.append(re.escape(frame.call_closes.strip()))
    parts += [re.escape(frame.last.strip()), re.escape(frame.closes.strip()) if marked else ""]
    return r"\s*".join(part for part in parts if part)


def _body(frame: Frame, name: str) -> str:
    """One call as the frame writes it."""
    given = rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}'
    if frame.body == "object":
        more = r'(?:"(?:id|type)"\s*:\s*"[^"]*")'
        inner = rf'"name"\s*:\s*"{name}"\s*,\s*"{frame.key}"\s*:\s*{given}'
        return rf"\{{\s*(?:{more}\s*,\s*)*{inner}\s*(?:,\s*{more}\s*)*\}}"
    if frame.body == "named":
        around = (frame.name_opens, frame.name_ends, frame.arguments_end)
        opens, ends, end = (re.escape(mark.strip()) for mark in around)
        number = rf"{re.escape(frame.id_opens)}\w+" if frame.id_opens else ""
        return rf"{opens}\s*{name}\s*{number}{ends}\s*{given}\s*{end}"
    if frame.body == "python":
        return rf"{name}\(\s*{_KEY}\s*=\s*[\"']{_VALUE}[\"']\s*\)"
    value = rf"<parameter={_KEY}>\s*{_VALUE}\s*</parameter>"
    return rf"<function={name}>\s*{value}\s*</function>"


def _is_harmony(text: str) -> bool:
    start, to = re.escape(harmony.START), rf"to={re.escape(harmony.FUNCTIONS)}{_NAMES[0]}"
    channel, message = re.escape(harmony.CHANNEL), re.escape(harmony.MESSAGE)
    inner = rf"{start}assistant[^{{]*?{to}[^{{]*?{message}\s*\{{"
    return bool(re.search(inner, text)) and bool(re.search(rf"{channel}commentary", text))


def thought_of(probed: Probed) -> tuple[str, str] | None:
    """The marks around a thought: the template writes them, drops what is between, or opens one."""
    said = {"role": "assistant", "content": _SAID}
    for key in THOUGHT_KEYS:
        text = probed.rendered(_ASKED, {**said, key: _THOUGHT})
        for opens, closes in THOUGHTS:
            inner = rf"{re.escape(opens)}\s*{_THOUGHT}\s*{re.escape(closes)}"
            if text and re.search(inner, text):
                return opens, closes
    for opens, closes in THOUGHTS:
        over = {"role": "assistant", "content": f"{opens}{_THOUGHT}{closes}{_SAID}"}
        text = probed.rendered(_ASKED, over, _ASKED)
        if text and _THOUGHT not in text and _SAID in text:
            return opens, closes
        if any(_opened(text, opens) for text in _beginnings(probed)):
            return opens, closes
    return None


def _beginnings(probed: Probed) -> Iterator[str]:
    for variables in (None, {"enable_thinking": True}, {"thinking": True}):
        text = probed.rendered(_ASKED, add_generation_prompt=True, chat_template_kwargs=variables)
        yield text or ""


def _opened(text: str, opens: str) -> bool:
    return text.rstrip().endswith(opens)


def is_opened(
    probed: Probed, opens: str, variables: Mapping[str, Any] | None, *, after_tool: bool = False
) -> bool:
    """Whether a turn of the assistant's begins inside of a thought.

    Some templates open none where the assistant goes on `after_tool`, the result of its call.
    """
    asked = {"add_generation_prompt": True, "chat_template_kwargs": variables}
    text = None
    for as_text in (False, True) if after_tool else ():
        call = {"role": "assistant", "content": "", "tool_calls": _calls(_NAMES[:1], as_text)}
        text = text or probed.rendered(_ASKED, call, _RESULT, tools=[_TOOL], **asked)
    text = text or probed.rendered(_ASKED, **asked)
    return text is not None and _opened(text, opens)
