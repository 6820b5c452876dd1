"""`jackfield chat --server`: the same conversation with a model of a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.cli.output import note, say
from jackfield.errors import JackfieldError, PromptError, UsageError

if TYPE_CHECKING:
    from jackfield.client.talking import Talk

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
    """What was said so far, oldest first."""

    talk: Talk
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        shown = _Shown()
        try:
            shown.show(self.talk, self.messages)
        except KeyboardInterrupt:
            note("(stopped)")
        except JackfieldError as error:
            if not (sys.stdin.isatty() or isinstance(error, PromptError)):
                raise
            say(f"error: {error}")
            if isinstance(error, PromptError) and len(self.messages) > 1:
                note(f"the conversation no longer fits into the model's context; {START_AFRESH}")
        else:
            shown.remark(self.talk)
        if shown.text:
            self.messages.append({"role": "assistant", "content": shown.text})
        else:
            self.messages.pop()


@dataclass
class _Shown:
    """An answer on the screen, and what the server said about it."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    seconds: float = 0.0

    def show(self, talk: Talk, messages: list[dict[str, str]]) -> None:
        began, thinking = time.perf_counter(), False
        pieces = talk.answer(messages)
        try:
            for piece in pieces:
                if piece.reasoning:
                    print(piece.reasoning, end="", file=sys.stderr, flush=True)
                    thinking = not piece.reasoning.endswith("\n")
                if piece.text:
                    if thinking:
                        print(file=sys.stderr)
                        thinking = False
                    self.text += piece.text  # first, since Ctrl-C may come in between
                    print(piece.text, end="", flush=True)
                self.finish_reason = piece.finish_reason or self.finish_reason
                self.tokens = (piece.usage or {}).get("completion_tokens", self.tokens)
        finally:
            pieces.close()
            self.seconds = time.perf_counter() - began
            if self.text and not self.text.endswith("\n"):
                print(flush=True)

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
