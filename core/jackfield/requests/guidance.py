"""What a request with guidance is led away from: its negative prompt, read and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jackfield.contracts import Requirements, Settings
from jackfield.errors import PromptError, SettingsError
from jackfield.requests.chat_settings import UNSAID, ChatSettings
from jackfield.requests.prompts import as_prompt_error, is_batch, listed


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Errors of prompts within are the negative prompt's."""
    try:
        yield
    except PromptError as error:
        raise PromptError(f"negative_prompt: {error}") from None


@as_prompt_error
def one_row(prompt: Any, chat: ChatSettings) -> tuple[Any, ChatSettings]:
    """A negative prompt, out of what `generate` of transformers takes a row of, and what of the
    request's `chat` is said of it. Raises PromptError where it has several rows.
    """
    prompt = listed(prompt)
    if is_batch(prompt):
        if len(prompt) > 1:
            raise PromptError(
                f"it has {len(prompt)} rows, and is one text, one list of token ids or one chat; "
                "give each prompt its own: settings=[{'negative_prompt': …}, …]"
            )
        prompt = prompt[0] if prompt else prompt
    is_chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
    return prompt, chat if is_chat else UNSAID


def check_pair(
    settings: Settings, lengths: tuple[int, int], needs: Requirements, places: int
) -> None:
    """Raise where a request can never run as two sequences.

    `lengths` are those of its prompt and of the negative one; `places` sequences run together.
    SettingsError, or PromptError for a negative prompt that is too long, or too short.
    """
    scale, (prompt, negative) = settings.guidance_scale, lengths
    if places < 2:
        raise SettingsError(
            f"guidance_scale={scale:g} runs a request as two sequences, and max_batch_size={places}"
            "; load the model with max_batch_size=2 or more, or drop it"
        )
    most = needs.context_length
    if most is not None and negative + settings.max_new_tokens > most:
        raise PromptError(
            f"a negative_prompt of {negative} tokens and {settings.max_new_tokens} new ones do not "
            f"fit into the model's context of {most}; shorten it, or lower max_new_tokens"
        )
    if needs.layout == "padded" and needs.ragged is not None and prompt != negative:
        raise PromptError(
            f"the negative_prompt has {negative} tokens and the prompt {prompt}, and "
            f"{needs.architecture} reads only rows of one length together in a padded cache "
            f"({needs.ragged}); give as many tokens, or select cache 'paged'"
        )
