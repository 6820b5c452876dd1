"""The items of a conversation as ``/v1/responses`` has them, and the messages that they make."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from jackfield.serving.schema.chat import FunctionCall, Message, ToolCall
from jackfield.serving.schema.common import Body, Names, Short, Text, text_or_list

#: An item, or an output of one: plain JSON as it is stored and sent.
Json = dict[str, Any]

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text"]
    text: Text


class OutputText(Body):
    """What an assistant said; its log-probabilities are for who reads it, not for the model."""

    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[dict[str, Any]] | None = None


def _part(value: Any) -> str | None:
    """The tag of a part; in brackets, as a client has not written it."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"({kind})" if kind in ("input_text", "output_text") else None


Part = Annotated[
    Annotated[InputText, Tag("(input_text)")] | Annotated[OutputText, Tag("(output_text)")],
    Discriminator(
        _part,
        custom_error_type="part_kind",
        custom_error_message="nothing here reads a part that is not of type input_text or "
        "output_text; drop it",
    ),
]
Parts = Annotated[list[Part], Field(max_length=10_000)]


Content = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[Parts, Tag("(list)")], Discriminator(text_or_list)
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Short | None = None
    status: Status | None = None
    phase: None = None


class Direct(Body):
    """Who called a function: the model itself."""

    type: Literal["direct"]


class Call(Body):
    type: Literal["function_call"]
    call_id: Short
    name: Names
    arguments: Text
    id: Short | None = None
    status: Status | None = None
    namespace: None = None
    caller: Direct | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class CallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Short
    output: Content
    id: Short | None = None
    status: Status | None = None
    name: Short | None = None
    namespace: None = None
    caller: Direct | None = None


class Thought(Body):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Body):
    """What an assistant thought; there are no summaries and nothing encrypted here."""

    type: Literal["reasoning"]
    id: Short | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Annotated[list[Thought], Field(max_length=10_000)] | None = None
    encrypted_content: Annotated[str, StringConstraints(max_length=0)] | None = None
    status: Status | None = None


class Reference(Body):
    """An item that is stored, by its id."""

    type: Literal["item_reference"] | None = None
    id: Short


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind(item: Any) -> str | None:
    if isinstance(item, Body):
        return f"({getattr(item, 'type', None) or 'item_reference'})"
    if not isinstance(item, Mapping):
        return None
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    return f"({kind})" if kind in _KINDS else None


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[Call, Tag("(function_call)")]
    | Annotated[CallOutput, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")]
    | Annotated[Reference, Tag("(item_reference)")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message=f"an item is one of {', '.join(_KINDS)}, as an object",
    ),
]

_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip


def new_id(kind: str) -> str:
    """An id of an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def id_of_output(kind: str, answer: str, index: int) -> str:
    """The id of the item of this type at `index` of what the answer of the id `answer` has."""
    digest = hashlib.sha256(f"{answer}/{index}".encode()).hexdigest()
    return f"{_PREFIXES[kind]}_{digest[:32]}"


def user_message(text: str) -> InputMessage:
    return InputMessage(role="user", content=text)


def as_json(item: InputMessage | Call | CallOutput | ReasoningItem) -> Json:
    """The item as it is stored and listed: with an id, a status, and content in parts."""
    found = item.model_dump(exclude_none=True, by_alias=True)
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    for part in found["content"] if item.type == "message" else ():
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    if isinstance(item, ReasoningItem):
        found.setdefault("summary", [])
    found.setdefault("status", "completed")
    return {"id": new_id(item.type), **found}


def messages(items: Sequence[Json], instructions: str | None) -> list[Message]:
    """The conversation as a chat has it.

    A thought, a text and calls that follow one another are one message of the assistant.
    """
    found: list[Message] = []
    if instructions is not None:
        found.append(_message("system", instructions))
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            found.append(_message(item["role"], _joined(item["content"])))
        elif item["type"] == "function_call_output":
            found.append(_result(item))
        else:
            if not _goes_on(found, item):
                found.append(_message("assistant", None))
            _add(found[-1], item)
    return found


def _message(role: str, content: str | None) -> Message:
    """Not validated again: its parts were, and may be longer together than one may be."""
    return Message.model_construct(role=role, content=content)


def _result(item: Json) -> Message:
    output = item["output"]
    found = _message("tool", output if isinstance(output, str) else _joined(output))
    found.tool_call_id, found.name = item["call_id"], item.get("name")
    return found


def _goes_on(found: list[Message], item: Json) -> bool:
    """Whether an item belongs to the last message: one thinks, then says, then calls."""
    if not found or found[-1].role != "assistant":
        return False
    last = found[-1]
    if item["type"] == "function_call":
        return True
    silent = last.content is None and not last.tool_calls
    return silent and (item["type"] == "message" or last.reasoning_content is None)


def _add(message: Message, item: Json) -> None:
    if item["type"] == "reasoning":
        message.reasoning_content = _joined(item.get("content") or ())
    elif item["type"] == "message":
        message.content = _joined(item["content"])
    else:
        call = FunctionCall(name=item["name"], arguments=item["arguments"])
        message.tool_calls = [
            *(message.tool_calls or ()), ToolCall(id=item["call_id"], function=call),
        ]  # fmt: skip


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
