"""A caller's own questions with one right answer each, as a JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.json_lines import new_tokens, prompt_of, read_objects
from jackfield.errors import UsageError, quoted, shown

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text

#: New tokens of an answer where its line does not say.
NEW_TOKENS = 64
_FIELDS = ("prompt", "messages", "answer", "max_new_tokens")
EXAMPLE = '{"prompt": "…", "answer": "…"}'


def read_answers(path: Path, text: Text, context: int | None) -> list[tuple[Any, str, int]]:
    """(prompt or messages, the right answer, new tokens at most) of each line.

    Raises UsageError, which names the line, also of a prompt that the model of `text` cannot be
    given, or that is longer than its `context` with what is asked for.
    """
    found = read_objects(path, _FIELDS, EXAMPLE, lambda line: _answer(line, text, context))
    if not found:
        raise UsageError(f"{shown(path)} has no answers; write {EXAMPLE} a line")
    return found


def _answer(line: dict[str, Any], text: Text, context: int | None) -> tuple[Any, str, int]:
    prompt = prompt_of(line)
    if not isinstance(answer := line.get("answer"), str) or not answer.strip():
        raise UsageError(f"answer must be a text, not {quoted(answer)}")
    most = new_tokens(line, NEW_TOKENS)
    if not isinstance(prompt, str if "prompt" in line else list) or not prompt:
        raise UsageError(f"a prompt is a text, and messages are a list, not {quoted(prompt)}")
    length = len(text.encode(prompt))
    if context is not None and length + most > context:
        raise UsageError(
            f"it has {length} tokens and asks for {most} more, and the model's context is "
            f"{context}; ask for less with max_new_tokens"
        )
    return prompt, answer, most
