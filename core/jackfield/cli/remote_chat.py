"""`jackfield chat --server`: the same conversation with a model of a server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.cli.output import note, say
from jackfield.cli.speech import Remembered, Speech
from jackfield.errors import JackfieldError, PromptError, UsageError

if TYPE_CHECKING:
    from jackfield.client.talking import Talk
    from jackfield.parsing.said import ToolCallDelta

START_AFRESH = "/reset starts afresh"
MISSING = "asking a server needs httpx; pip install jackfield[client]"


@contextlib.contextmanager
def conversation(
    url: str, api_key: str | None, model: str | None, settings: dict[str, Any]
) -> Iterator[RemoteConversation]:
    """One with a server's model, the only one where none is named. Raises UsageError."""
    try:
        from jackfield.client.address import Address
        from jackfield.client.talking import Talk, as_fields
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error.name} is not here)") from None
    address, asked = Address.of(url, api_key), as_fields(settings)
    with address.client() as client:
        chosen = model or address.only_model(client)
        if sys.stdin.isatty():
            note(f"{chosen} at {address.base}")
        yield RemoteConversation(Talk(address, chosen, asked, client))


@dataclass
class RemoteConversation:
    """With a model of a server."""

    talk: Talk
    past: Remembered = field(default_factory=Remembered)

    def answer(self) -> None:
        shown = _Shown()
        try:
            shown.show(self.talk, self.past.messages)
        except KeyboardInterrupt:
            note("(stopped)")
            shown.calls.clear()
        except JackfieldError as error:
            if not (sys.stdin.isatty() or isinstance(error, PromptError)):
                raise
            say(f"error: {error}")
            if isinstance(error, PromptError) and len(self.past.messages) > 1:
                note(f"the conversation no longer fits into the model's context; {START_AFRESH}")
            shown.calls.clear()
        else:
            shown.remark(self.talk)
        self.past.said(shown.message)


@dataclass
class _Shown:
    """An answer on the screen, and what the server said about it."""

    speech: Speech = field(default_factory=Speech)
    calls: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # id, name, arguments
    finish_reason: str | None = None
    tokens: int | None = None
    seconds: float = 0.0

    @property
    def message(self) -> dict[str, Any] | None:
        """The answer, to be sent again; None: nothing was said."""
        found: dict[str, Any] = {"role": "assistant", "content": self.speech.text}
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name, arguments in self.calls.values()
            if _is_whole(arguments)
        ]
        if calls:
            found["tool_calls"] = calls
        return found if calls or self.speech.text else None

    def show(self, talk: Talk, messages: list[dict[str, Any]]) -> None:
        began = time.perf_counter()
        pieces = talk.answer(messages)
        try:
            for piece in pieces:
                self.speech.show(piece.reasoning, piece.text, piece.calls)
                for call in piece.calls:
                    self._add(call)
                self.finish_reason = piece.finish_reason or self.finish_reason
                self.tokens = (piece.usage or {}).get("completion_tokens", self.tokens)
        finally:
            pieces.close()
            self.seconds = time.perf_counter() - began
            self.speech.end()

    def _add(self, call: ToolCallDelta) -> None:
        number, name, arguments = self.calls.get(call.index, ("", "", ""))
        own = (number or call.id or "", name or call.name or "", arguments + call.text)
        self.calls[call.index] = own

    def remark(self, talk: Talk) -> None:
        if self.finish_reason == "length":
            most = talk.fields.get("max_tokens")
            if most is not None and self.tokens in (None, most):
                note(f"(cut after {most} tokens; --max-new-tokens allows more)")
            else:
                after = "" if self.tokens is None else f" after {self.tokens} tokens"
                note(f"(cut{after}: the model's context is full, or the server's bound is reached; "
                     f"{START_AFRESH})")  # fmt: skip
        if sys.stdin.isatty() and self.tokens and self.seconds:
            note(f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} tokens/s")


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
