"""`jackfield chat`: a conversation that remembers what was said."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from jackfield.cli.files import decoded
from jackfield.cli.generate import show, summary
from jackfield.cli.options import Backends, Batches, OptionalModel, Settings, flag, load
from jackfield.cli.output import note, say
from jackfield.cli.remote_chat import START_AFRESH, conversation
from jackfield.cli.speech import Remembered, Speech
from jackfield.errors import ExecutionError, PromptError, UsageError

if TYPE_CHECKING:
    from jackfield.engine.completions import Completion
    from jackfield.engine.engine import Engine

GREETING = "/reset forgets the conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer"


@dataclass(frozen=True)
class Elsewhere:
    """A server that answers instead of a model in this process."""

    server: Annotated[
        str | None,
        flag("--server", "URL", "Ask a server that speaks OpenAI's protocol.", "--base-url"),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="JACKFIELD_API_KEY", help="The key for --server."
        ),
    ] = None


class Speaker(Protocol):
    """Who answers, and what was said so far."""

    past: Remembered

    def answer(self) -> None:
        """Answer the last message; what was shown of an answer that is stopped is remembered."""


def chat(
    backends: Backends,
    settings: Settings,
    batches: Batches,
    elsewhere: Elsewhere,
    model: OptionalModel = None,
) -> None:
    """Talk with a chat model; it sees the whole conversation each time.

    /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. When standard
    input is a file or a pipe, each line of it is a message. With --tools the model may call
    functions: after an answer with calls the next lines are their results. With --server the model
    is one of a server's: any that speaks OpenAI's protocol.

    Example: jackfield chat demo --temperature 0.8
    """
    asked = settings.to_dict()
    if elsewhere.server is not None:
        _refuse_of_engines(backends, batches)
        with conversation(elsewhere.server, elsewhere.api_key, model, asked) as speaker:
            _talk(speaker)
        return
    with load(model or "demo", backends, batches) as engine:
        own = Conversation(engine, asked)
        own.check()
        _talk(own)


def _refuse_of_engines(*groups: Any) -> None:
    """Raise UsageError for a flag that says how a model is run: a server has decided that."""
    for given, usual in ((group, type(group)()) for group in groups):
        for one in fields(given):
            if getattr(given, one.name) != getattr(usual, one.name):
                written = one.name.replace("_", "-")
                raise UsageError(f"--{written} is for the server to say, not for --server; drop it")


def _talk(speaker: Speaker) -> None:
    if sys.stdin.isatty():
        note(GREETING)
    while (line := _read_line(speaker.past.asks)) is not None and line != "/exit":
        if line == "/reset":
            speaker.past.forget()
            note("the conversation is forgotten")
        elif line and speaker.past.told(line):
            speaker.answer()


def _read_line(asks: str) -> str | None:
    """The next message without white space around it; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return decoded(line, "a line of standard input").strip() if line else None
    with contextlib.suppress(ImportError):  # not on every system; gives input() a history
        import readline  # noqa: F401
    while True:
        try:
            return input(asks).strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            say("\n(/exit or Ctrl-D ends)")


@dataclass
class Conversation:
    """With a model in this process."""

    engine: Engine
    settings: dict[str, Any]
    past: Remembered = field(default_factory=Remembered)

    def check(self) -> None:
        """Raise now what each message would: no chat template, a setting that cannot be."""
        probe = [{"role": "user", "content": "Hello"}]
        self.engine.stream(probe, **self.settings)  # checks at once, computes when it is read

    def answer(self) -> None:
        speech = Speech()
        try:
            completion = show(self.engine, self.past.messages, self.settings, speech)
        except PromptError as error:
            self.past.said(None)
            say(f"error: {error}")
            if self.past.messages:
                note(f"the conversation no longer fits into the model's context; {START_AFRESH}")
            return
        except KeyboardInterrupt:
            note("(stopped)")
            message = {"role": "assistant", "content": speech.text}
        else:
            self._remark(completion)
            message = completion.message
        says = message["content"] or message.get("tool_calls")
        self.past.said(message if says else None)

    def _remark(self, completion: Completion) -> None:
        if completion.error is not None:
            raise ExecutionError(completion.error)
        usage = completion.usage
        context = self.engine.plan.requirements.context_length
        if context is not None and usage.prompt_tokens + usage.completion_tokens >= context:
            note(f"(cut: the model's context of {context} tokens is full; {START_AFRESH})")
        elif completion.finish_reason == "length":
            note(f"(cut after {usage.completion_tokens} tokens; --max-new-tokens allows more)")
        if sys.stdin.isatty():
            note(summary(completion))
