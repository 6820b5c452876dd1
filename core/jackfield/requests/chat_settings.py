"""What a request says of a chat beside its messages: how it ends, and what its template is told."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jackfield.errors import PromptError, SettingsError, first_line, quoted

#: Arguments of `apply_chat_template` that are no variables of a template's own: what to do.
_NO_VARIABLE = {
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "documents", "sanitize_control_tokens",
         "tools"),
        "it is a setting by itself, beside chat_template_kwargs",
    ),
    **dict.fromkeys(("conversation", "messages"), "the messages are the prompt"),
    "chat_template": "a request never chooses a template; give jackfield.load a tokenizer with it",
    **dict.fromkeys(
        ("max_length", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict",
         "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
        "it is about tokens and not about the template",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ChatSettings:
    """Settings of a chat, by the names that they have in `apply_chat_template`; None: nothing said.

    Attributes:
        continue_final_message: Whether the last message goes on.
        add_generation_prompt: Whether a turn of the assistant's begins after it.
        tools: The functions that the model may call, as JSON schemas of transformers and OpenAI.
        documents: What it may look things up in: objects of JSON.
        chat_template_kwargs: Variables that its template reads; `enable_thinking`, as most call the
            switch of thoughts, is a setting of a request by itself, too.
        sanitize_control_tokens: Whether names of control tokens in all of these, and in messages,
            are read as text. The tokens that the template itself writes are none of them.
    """

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    sanitize_control_tokens: bool | None = None

    def of(self, messages: Sequence[Any]) -> ChatSettings:
        """The same with its end not left open. Raises PromptError where it may mean two things."""
        continues, begins = self.continue_final_message, self.add_generation_prompt
        if continues is None and begins is None and _is_assistants(messages[-1]):
            raise PromptError(
                "the last message is the assistant's: continue_final_message=True continues it, as "
                "transformers' pipelines do, add_generation_prompt=True ends it and begins another"
            )
        return replace(
            self,
            continue_final_message=bool(continues),
            add_generation_prompt=not continues if begins is None else begins,
        )

    def refuse_without_chat(self) -> None:
        """Raise PromptError where something is asked for that only a chat has."""
        for name in _FIELDS:
            if value := getattr(self, name):
                what = f"{name}=True" if value is True else name
                if name == _TOLD and THINKING in value:
                    what = f"{THINKING} or {name}"
                raise PromptError(
                    f"{what} is about chat messages, and this prompt is none; drop it"
                )


THINKING, _TOLD = "enable_thinking", "chat_template_kwargs"
_FIELDS = tuple(field.name for field in fields(ChatSettings))
OF_A_CHAT = (*_FIELDS, THINKING)
UNSAID = ChatSettings()


def _is_assistants(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def chat_settings_of(asked: Mapping[str, Any]) -> tuple[ChatSettings, dict[str, Any]]:
    """What a request says of its chat, and its other settings. Raises SettingsError."""
    said = {name: asked[name] for name in OF_A_CHAT if asked.get(name) is not None}
    thinks = said.pop(THINKING, None)
    found = ChatSettings(**{name: _READ[name](name, value) for name, value in said.items()})
    if thinks is not None:
        found = replace(found, chat_template_kwargs=_with_thinking(found, _flag(THINKING, thinks)))
    if found.continue_final_message and found.add_generation_prompt:
        raise SettingsError(
            "continue_final_message=True and add_generation_prompt=True contradict each other: "
            "the last message goes on, or a new one begins; give one of them"
        )
    return found, {k: v for k, v in asked.items() if k not in OF_A_CHAT}


def _with_thinking(chat: ChatSettings, thinks: bool) -> dict[str, Any]:
    told = dict(chat.chat_template_kwargs or {})
    if told.setdefault(THINKING, thinks) is not thinks:
        raise SettingsError(
            f"{THINKING}={thinks} and {_TOLD}={{{THINKING!r}: {quoted(told[THINKING])}}} "
            "contradict each other; give one of them"
        )
    return told


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{name} must be True or False, not {quoted(value)}")
    return value


def _objects(name: str, value: Any) -> list[Mapping[str, Any]] | None:
    """A list of objects as JSON; None where it has none."""
    if not isinstance(value, list | tuple):
        raise SettingsError(f"{name} must be a list, not {quoted(value)}")
    return [_object(f"{name}[{n}]", item) for n, item in enumerate(value)] or None


def _tools(name: str, value: Any) -> list[Mapping[str, Any]] | None:
    """Tools as JSON: functions become their schemas, as in transformers."""
    if not isinstance(value, list | tuple):
        raise SettingsError(f"{name} must be a list, not {quoted(value)}")
    functions = [inspect.isfunction(tool) or inspect.ismethod(tool) for tool in value]
    pairs = enumerate(zip(value, functions, strict=True))
    return _objects(
        name, [_schema(f"{name}[{n}]", tool) if made else tool for n, (tool, made) in pairs]
    )


def _schema(where: str, function: Callable[..., Any]) -> Any:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise SettingsError(
            f"{where}: transformers makes no schema of {quoted(function.__name__)}: "
            f"{first_line(error)[:300]}"
        ) from error


def _object(where: str, value: Any) -> Mapping[str, Any]:
    """A copy of an object, as JSON."""
    if not isinstance(value, Mapping):
        raise SettingsError(f"{where} must be an object of JSON, not {quoted(value)}")
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{where} is not JSON: {first_line(error)[:300]}") from None
    return found


def _variables(name: str, value: Any) -> Mapping[str, Any] | None:
    found = _object(name, value)
    for key in found:
        if key in _NO_VARIABLE:
            raise SettingsError(f"{name} has {quoted(key)}: {_NO_VARIABLE[key]}")
        if not key.isidentifier() or key.startswith("_"):
            raise SettingsError(f"{name} has {quoted(key)}, which no variable can be called")
    return found or None


_READ: Mapping[str, Callable[[str, Any], Any]] = {
    "continue_final_message": _flag,
    "add_generation_prompt": _flag,
    "tools": _tools,
    "documents": _objects,
    "chat_template_kwargs": _variables,
    "sanitize_control_tokens": _flag,
}
