"""A turn of the assistant: what the engine is asked for, and what its text says."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from jackfield.engine.completions import Delta
from jackfield.engine.engine import Engine
from jackfield.errors import JackfieldError, quoted
from jackfield.parsing.calling import Calling
from jackfield.parsing.formats import Format
from jackfield.parsing.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    merged,
)
from jackfield.serving.asking import Asking
from jackfield.serving.errors import as_api_error, refused
from jackfield.serving.schema.chat import ChatRequest, Message
from jackfield.serving.settings import ServerSettings

logger = logging.getLogger("jackfield.serving")

_SWITCHES = ("enable_thinking", "thinking")  # the first is how most templates call it
_EFFORT = "reasoning_effort"


class Said:
    """Cuts one text into the fields of deltas; without a parser all of it is content."""

    def __init__(self, parser: Calling | None = None) -> None:
        self._parser = parser
        self._called = False

    @property
    def plain(self) -> bool:
        """Whether all of it is content, however it is cut."""
        return self._parser is None

    @property
    def done(self) -> bool:
        """Whether what the model goes on to say is not wanted."""
        return self._parser is not None and self._parser.done

    def said(self, delta: Delta) -> list[dict[str, Any]]:
        """What a piece of text says, as fields of a message."""
        if self._parser is None:
            return [{"content": delta.text}] if delta.text else []
        parts = list(self._parser.push(delta.text))
        if delta.completion is not None:
            parts += self._parser.finish()
        return [field for part in merged(parts) for field in self._fields(part)]

    def _fields(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Content(text):
                return [{"content": text}]
            case Reasoning(text):
                return [{"reasoning_content": text}]
            case CallBegun(index, number, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": number, "type": "function", "function": function}
                return [{"tool_calls": [call]}]
            case CallArguments(index, text):
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
            case CallEnded(_, whole):
                self._called |= whole
        return []

    def finish_reason(self, delta: Delta) -> str | None:
        """Why the text ended, if it has."""
        reason = delta.finish_reason
        if reason == "cancelled" and self.done:
            return "tool_calls"
        return "tool_calls" if reason == "stop" and self._called else reason


class Turn:
    """What is asked of the engine for a turn of a chat, and how its texts are read.

    `prompt` are the messages as the chat template has them, `asked` the engine's settings.
    """

    def __init__(self, body: ChatRequest, asking: Asking, engine: Engine) -> None:
        tokenizer: Any = engine.tokenizer
        _check_results(body.messages)
        messages: list[Any] = [message.plain() for message in body.messages]
        asked = {**body.asked(), **asking.length(body.most, engine)}
        self._format: Format | None = None
        self._how: dict[str, Any] = {}
        self._opened = False
        self._answer: dict[str, Any] | None = None
        self._id = asking.id
        if getattr(tokenizer, "chat_template", None):
            form = engine.chat_format
            asked["sanitize_control_tokens"] = asking.settings.sanitize_control_tokens
            if told := template_kwargs(body, asking, form):
                asked["chat_template_kwargs"] = told
            self._read_by(form, body, told, asked)
            messages = self._told(messages, asked, body)
        self.prompt: Sequence[Any] = messages
        self.asked = asking.completed(asked)

    def _read_by(
        self, form: Format, body: ChatRequest, told: dict[str, Any], asked: dict[str, Any]
    ) -> None:
        tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
        if not tools and body.tool_choice not in (None, "none", "auto"):
            raise refused("tool_choice: there are no tools to choose from", "tool_choice")
        choice = body.choice
        one = not isinstance(choice, str)  # a function that is named is called once
        self._how = {
            "tools": tools or None,
            "tool_choice": choice,
            "parallel": body.parallel_tool_calls is not False and not one,
        }
        if not tools and form.is_plain:
            return
        self._format = form
        last = body.messages[-1]
        continued = ""
        if body.continue_final_message and isinstance(last.content, str):
            continued = last.content
        after_tool = last.role == "tool"
        if tools and choice == "auto":  # an answer that is so, or calls
            self._answer = asked.pop("json_schema", None)
        held = (
            None if _structure_in(asked) is None else asked.get("regex", asked.get("grammar", ""))
        )
        self._opened = form.starts_in_reasoning(
            told, continued, after_tool=after_tool, confined=held
        )

    def _told(self, messages: list[Any], asked: dict[str, Any], body: ChatRequest) -> list[Any]:
        """The messages as the template takes them; `asked` gets what calls and thoughts need."""
        if self._format is None:
            return messages
        needed = self._format.settings(
            **self._how,
            starts_in_reasoning=self._opened,
            answer=self._answer,
            model=body.model,
        )
        if "grammar" in needed and (other := _structure_in(asked)) is not None:
            field = ChatRequest.NAMES.get(other, other)
            raise refused(f"{field}: {_why_held(body)}, and a text has one structure", field)
        asked.update(needed)
        return self._format.messages(messages)

    def parser(self, number: int) -> Said:
        """What reads the text of this number."""
        if self._format is None:
            return Said()
        parser = self._format.parser(**self._how, starts_in_reasoning=self._opened)
        parser.name = f"{self._id}/{number}"
        return Said(parser)


def _check_results(messages: Sequence[Message]) -> None:
    """Raise ApiError for the result of a call that no message before it makes."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls or ())
        if message.role != "tool" or message.tool_call_id in called:
            continue
        field = f"messages.{at}.tool_call_id"
        if message.tool_call_id is None:
            raise refused(f"{field}: a result names its call; write the id of the call", field)
        raise refused(
            f"{field}: no call before it has the id {quoted(message.tool_call_id)}; send the "
            "assistant's message with its tool_calls too",
            field,
        )


def _why_held(body: ChatRequest) -> str:
    """What has calls keep to a structure of their own, and how it has none."""
    if body.choice != "auto":
        return "tool_choice requires a call, which has its own; drop one of them"
    strict = next(tool.function.name for tool in body.offered if tool.function.strict)
    return f"calls of {strict!r}, which is strict, have their own; write strict: false there"


def _structure_in(asked: dict[str, Any]) -> str | None:
    return next((n for n in ("json_schema", "regex", "grammar", "choices") if n in asked), None)


def template_kwargs(body: ChatRequest, asking: Asking, form: Format) -> dict[str, Any]:
    """What a chat template is told: the server's defaults as far as it reads them, and the body's.

    Raises ApiError for an effort that the template knows nothing of.
    """
    tools = bool(body.offered) and body.choice != "none"  # then the template is told of none
    found, _ = defaults(asking.settings, form, tools=tools)
    if (effort := body.reasoning_effort) is not None:
        if form.reads(_EFFORT, tools=tools):
            found[_EFFORT] = effort
        elif (switch := _switch(form, tools=tools)) is not None:
            found[switch] = effort != "none"
            if effort != "none":
                _say_once(body.model)
        else:
            raise refused(
                f"reasoning_effort={effort!r}: the chat template of {body.model} knows no effort "
                "and no switch of reasoning; drop it",
                "reasoning_effort",
            )
    return found | (body.chat_template_kwargs or {})


@functools.cache
def _say_once(model: str) -> None:
    logger.warning(
        "%s: its chat template knows no effort of reasoning, only on and off; every "
        "reasoning_effort but 'none' is the same there", model,
    )  # fmt: skip


def defaults(
    settings: ServerSettings, form: Format, *, tools: bool
) -> tuple[dict[str, Any], list[str]]:
    """What a chat template is told by the server's settings, and those of them that it ignores."""
    given = settings.chat_template_kwargs
    found = {name: value for name, value in given.items() if form.reads(name, tools=tools)}
    ignored = [f"chat_template_kwargs.{name}" for name in given if name not in found]
    if settings.reasoning != "auto":
        if (switch := _switch(form, tools=tools)) is None:
            ignored.append("reasoning")
        else:
            found[switch] = settings.reasoning == "on"
    return found, ignored


def _switch(form: Format, *, tools: bool) -> str | None:
    """The variable by which a chat template has the model think, or not."""
    return next((name for name in _SWITCHES if form.reads(name, tools=tools)), None)


def turn_for(body: ChatRequest, asking: Asking, engine: Engine) -> Turn:
    """How the model takes its turn. Raises ApiError."""
    try:
        return Turn(body, asking, engine)
    except JackfieldError as error:
        raise as_api_error(error, body.model, body.NAMES, "messages") from error
