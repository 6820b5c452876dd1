"""From what a caller calls a prompt (text, token ids, chat messages) to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.errors import PromptError

#: A string, a list of token ids, or a list of chat messages ({"role": …, "content": …}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_BYTES = bytes | bytearray | memoryview


def encode(prompt: Prompt, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """Token ids of `prompt`. Raises PromptError."""
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character")
        ids = list(_need(tokenizer)(prompt)["input_ids"])
        if not ids:
            raise PromptError(f"the prompt {prompt!r} gives no token; give more text")
        return _check_tokenizer(ids, vocab_size)
    if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence):
        raise PromptError(
            "a prompt is a string, a list of token ids or a list of chat messages, not "
            f"{type(prompt).__name__}"
        )
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token or message")
    if isinstance(prompt[0], Mapping):
        return _check_tokenizer(_chat(prompt, _need(tokenizer)), vocab_size)
    return _check_ids(prompt, vocab_size)


def is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts rather than one prompt."""
    if isinstance(prompts, str | _BYTES) or not isinstance(prompts, Sequence):
        return False
    return not prompts or not isinstance(prompts[0], int | Mapping)


def _need(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer, so prompts must be lists of token ids; give "
            "jackfield.load a tokenizer to use text"
        )
    return tokenizer


def _chat(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise PromptError(f"a chat message needs 'role' and 'content', got {message!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template; give plain text instead")
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        said = " ".join(str(error).split())
        raise PromptError(f"the chat template refuses these messages: {said}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_tokenizer(ids: list[int], vocab_size: int) -> list[int]:
    if max(ids, default=0) >= vocab_size:
        raise PromptError(
            f"the tokenizer gives the token {max(ids)} where the model's vocabulary ends at "
            f"{vocab_size - 1}; give jackfield.load the tokenizer of this model"
        )
    return ids


def _check_ids(prompt: Sequence[Any], vocab_size: int) -> list[int]:
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise PromptError(
                f"the prompt holds {token!r}, which is no token id (0 to {vocab_size - 1})"
            )
    return list(prompt)
