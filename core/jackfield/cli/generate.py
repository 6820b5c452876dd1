"""`jackfield generate`: text from a prompt, shown as it is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jackfield.cli.files import decoded, read_file
from jackfield.cli.options import Backends, Batches, JsonOption, ModelOption, Settings, load
from jackfield.cli.output import note, print_json, ran
from jackfield.cli.speech import Speech
from jackfield.errors import ExecutionError, UsageError

if TYPE_CHECKING:
    from jackfield.engine.completions import Completion
    from jackfield.engine.engine import Engine

PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The text to go on from.")
]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Send the prompt as a user's message to a chat model.")
]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE", help="An image before the prompt, with --chat; may be repeated."
    ),
]


@dataclass(frozen=True)
class WithLogprobs(Settings):
    """The settings of which JSON can show more than text can."""

    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Log-probabilities of N tokens a step; with --json."),
    ] = None


def generate(
    backends: Backends,
    settings: WithLogprobs,
    batches: Batches,
    prompt: PromptArgument = None,
    file: FileOption = None,
    chat: ChatOption = False,
    image: ImageOption = None,
    model: ModelOption = "demo",
    json: JsonOption = False,
) -> None:
    """Continue a text, or answer it with --chat.

    The prompt is the argument, a file, or standard input; one newline at the end of the latter two
    is dropped. The text goes to standard output as it is made, calls of --tools with it; what a
    chat model thinks goes to standard error, and then one line that says what ran.

    Example: jackfield generate --chat "Sort these numbers: 41 7 88 23"
    """
    if settings.logprobs is not None and not json:
        raise UsageError("--logprobs shows nothing in plain text; add --json")
    text = read_prompt(prompt, file)
    asked = settings.to_dict()
    request = _request(text, image or (), chat=chat)
    with load(model, backends, batches) as engine:
        if json:
            completion = engine.submit(request, **asked).result()
            print_json(completion.to_dict() | {"plan": engine.plan.to_dict()})
        else:
            completion = show(engine, request, asked)
            note(summary(completion))
    if completion.error is not None:
        raise ExecutionError(completion.error)


def _request(text: str, images: Sequence[Path], *, chat: bool) -> Any:
    """What the engine is asked. Raises UsageError for images of what is no chat."""
    if not chat:
        if images:
            raise UsageError("--image is a part of a message; add --chat")
        return text
    content: list[dict[str, Any]] = [{"type": "image", "image": path} for path in images]
    content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content if images else text}]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the one place that has it. Raises UsageError."""
    if argument is not None and file is not None:
        raise UsageError("a prompt and --file are two prompts; give one of them")
    if argument is not None:
        return decoded(argument.encode(errors="surrogateescape"), "the prompt")
    if file is not None:
        return _without_newline(decoded(read_file(file), str(file)))
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            'there is no prompt; write `jackfield generate "Once upon a time"`, give --file FILE, '
            "or pipe a text into it (`jackfield chat` holds a conversation)"
        )
    return _without_newline(decoded(sys.stdin.buffer.read(), "standard input"))


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def show(
    engine: Engine, prompt: Any, settings: dict[str, Any], speech: Speech | None = None
) -> Completion:
    """Stream the answer to the screen, and end its last line."""
    if engine.tokenizer is None:
        raise UsageError(
            "this model has no tokenizer, so it takes and gives token ids: "
            "in Python jackfield.load(MODEL, tokenizer='FOLDER') gives it one"
        )
    speech = speech or Speech()
    try:
        for delta in engine.stream(prompt, **settings):
            speech.show(delta.reasoning, delta.content, delta.tool_calls)
            if delta.completion is not None:
                return delta.completion
    finally:
        speech.end()
    raise ExecutionError("the engine ended the stream without a completion")


def summary(completion: Completion) -> str:
    usage = completion.usage
    rate = usage.completion_tokens / usage.seconds if usage.seconds else 0.0
    tokens = f"{usage.completion_tokens} tokens, {rate:.1f} tokens/s"
    return f"{ran(completion.report)} · {tokens}"
