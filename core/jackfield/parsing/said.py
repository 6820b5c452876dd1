"""Content, reasoning and tool calls of an answer, put together from its parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from jackfield.errors import UsageError
from jackfield.parsing.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
)

C = TypeVar("C")


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name`. `text` is the JSON of its arguments, as far as it came.

    `whole`: all of them came. An answer that ends in the midst of a call has one that is not.
    """

    id: str
    name: str
    text: str
    whole: bool = True

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names. Raises UsageError for a call that is not whole."""
        if not self.whole:
            raise UsageError(
                f"the call of {self.name} breaks off in its arguments, so it cannot be made; ask "
                "for more with max_new_tokens, or look at its text"
            )
        found: dict[str, Any] = json.loads(self.text)
        return found

    def to_dict(self) -> dict[str, Any]:
        """`arguments` are None, and `text` is there, where it is not whole."""
        told = {"arguments": self.arguments} if self.whole else {"arguments": None,
                                                                 "text": self.text}  # fmt: skip
        return {"id": self.id, "name": self.name, **told}


@dataclass(frozen=True)
class ToolCallDelta:
    """What a step added to call number `index` of an answer, the first being 0.

    `id` and `name` come with its first piece, else they are None; the pieces of `text` are the JSON
    of its arguments. `ended`: no more comes.
    """

    index: int
    id: str | None = None
    name: str | None = None
    text: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Said(Generic[C]):
    """Texts for the reader, what was thought, and calls; `unread`: why no call can be found."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[C, ...] = ()
    unread: str | None = None

    @property
    def tool_calls(self) -> list[C]:
        """The calls, in their order. Raises UsageError where the form of calls is not known."""
        if self.unread is not None:
            raise UsageError(self.unread)
        return list(self.calls)


def piece(parts: Iterable[Part], unread: str | None = None) -> Said[ToolCallDelta]:
    """What a part of an answer says."""
    content = reasoning = ""
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, Content):
            content += part.text
            continue
        if isinstance(part, Reasoning):
            reasoning += part.text
            continue
        own = calls.get(part.index, ToolCallDelta(part.index))
        if isinstance(part, CallBegun):
            own = replace(own, id=part.id, name=part.name)
        elif isinstance(part, CallArguments):
            own = replace(own, text=own.text + part.text)
        else:
            own = replace(own, ended=True)
        calls[part.index] = own
    return Said(content, reasoning, tuple(calls.values()), unread)


def whole(parts: Iterable[Part], unread: str | None = None) -> Said[ToolCall]:
    """What an answer says that has ended."""
    parts = list(parts)
    ended = {part.index for part in parts if isinstance(part, CallEnded) and part.whole}
    found = piece(parts, unread)
    calls = [
        ToolCall(call.id or "", call.name or "", call.text, call.index in ended)
        for call in found.calls
    ]
    return Said(found.content, found.reasoning, tuple(calls), unread)
