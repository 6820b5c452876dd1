"""`jackfield chat`: a conversation that remembers what was said."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.generate import decoded, show, summary
from jackfield.cli.options import Backends, Batches, ModelOption, Settings, load
from jackfield.cli.output import note, say
from jackfield.errors import ExecutionError, PromptError, UsageError

if TYPE_CHECKING:
    from jackfield.engine.completions import Completion
    from jackfield.engine.engine import Engine

GREETING = "/reset forgets the conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer"
START_AFRESH = "/reset starts afresh"


def chat(
    backends: Backends,
    settings: Settings,
    batches: Batches,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False),
    ] = None,
    model: ModelOption = "demo",
) -> None:
    """Talk with a chat model; it sees the whole conversation each time.

    /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. When standard
    input is a file or a pipe, each line of it is a message.

    Example: jackfield chat demo --temperature 0.8
    """
    if name is not None and model not in (name, "demo"):
        raise UsageError(f"{name} and --model {model} name two models; give one")
    model = name or model
    asked = settings.to_dict()
    with load(model, backends, batches) as engine:
        conversation = Conversation(engine, asked)
        conversation.check()
        if sys.stdin.isatty():
            note(GREETING)
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                conversation.messages.clear()
                note("the conversation is forgotten")
            elif line:
                conversation.answer(line)


def _read_line() -> str | None:
    """The next message without white space around it; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return decoded(line, "a line of standard input").strip() if line else None
    with contextlib.suppress(ImportError):  # not on every system; gives input() a history
        import readline  # noqa: F401
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            say("\n(/exit or Ctrl-D ends)")


@dataclass
class Conversation:
    """What was said so far, oldest first."""

    engine: Engine
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def check(self) -> None:
        """Raise now what each message would: no chat template, a setting that cannot be."""
        probe = [{"role": "user", "content": "Hello"}]
        self.engine.stream(probe, **self.settings)  # checks at once, computes when it is read

    def answer(self, text: str) -> None:
        """Answer one message; what was shown of an answer that is stopped is remembered."""
        self.messages.append({"role": "user", "content": text})
        shown: list[str] = []
        try:
            completion = show(self.engine, self.messages, self.settings, shown)
        except PromptError as error:
            self.messages.pop()
            say(f"error: {error}")
            if self.messages:
                note(f"the conversation no longer fits into the model's context; {START_AFRESH}")
            return
        except KeyboardInterrupt:
            note("(stopped)")
        else:
            self._remark(completion)
        if answer := "".join(shown):
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()

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
