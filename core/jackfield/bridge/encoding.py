"""From a prompt (text, token ids, chat messages) to token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield.bridge.control_tokens import Marks, marks_for
from jackfield.errors import PromptError, quoted
from jackfield.foreign import named
from jackfield.requests.chat_settings import UNSAID, ChatSettings
from jackfield.requests.prompts import BYTES, Prompt, as_prompt_error

if TYPE_CHECKING:
    from jackfield.bridge.image_chats import Places

_NO_LOCK = contextlib.nullcontext()

#: Text that is this many times longer than the context is looked at piece by piece, …
_LONG = 16  # characters a token
_SURE = 2  # … and refused where a beginning has this many times too many tokens


@as_prompt_error
def encode(
    prompt: Prompt,
    tokenizer: Any | None,
    vocab_size: int,
    most: int | None = None,
    lock: contextlib.AbstractContextManager[Any] = _NO_LOCK,
    chat: ChatSettings = UNSAID,
    images: Places | None = None,
) -> list[int]:
    """Token ids of `prompt`. Raises PromptError, early where there are far more than `most`.

    `chat` is what is said of a chat beside its messages; nothing where the prompt is none. `images`
    are those of its parts `{"type": "image"}`, in order.
    `lock` is held while `tokenizer` is called, and not while its chat template is at work.
    """

    def read(text: str, **how: bool) -> list[int]:
        reads = _need(tokenizer)
        with lock, named("the prompt cannot be read", PromptError):  # also where Rust panics
            return list(reads(text, **how)["input_ids"])

    if not _is_chat(prompt):
        chat.refuse_without_chat()
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character")
        ids = _read(prompt, read, vocab_size, most)
        if not ids:
            raise PromptError(f"the prompt {prompt[:100]!r} gives no token; give more text")
        return ids
    if prompt is None:
        raise PromptError("there is no prompt; write engine.generate('…'), or stream or submit")
    if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, BYTES) or not isinstance(prompt, Sequence):
        raise PromptError(
            "a prompt is a string, a list of token ids or a list of chat messages, not "
            f"{type(prompt).__name__}"
        )
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token or message")
    if _is_chat(prompt):
        text, marks = _chat(prompt, _need(tokenizer), chat.of(prompt), images)
        reads = partial(read, add_special_tokens=False)
        if marks is not None:
            reads = partial(marks.encode, read=read)
        of_images = 0 if images is None else images.num_tokens
        ids = _read(text, reads, vocab_size, most, of_images)
        if not ids:
            raise PromptError("the chat template makes no token of these messages; give plain text")
        return ids
    return _check_ids(prompt, vocab_size)


def _is_chat(prompt: Any) -> bool:
    sequence = isinstance(prompt, Sequence) and not isinstance(prompt, str | BYTES)
    return sequence and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _need(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer, so prompts must be lists of token ids; in Python "
            "jackfield.load(MODEL, tokenizer='FOLDER') gives it one"
        )
    return tokenizer


def _chat(
    messages: Sequence[Any], tokenizer: Any, asked: ChatSettings, images: Places | None
) -> tuple[str, Marks | None]:
    """The text of a chat, and the marks in it around what is text and no control token."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template; give plain text instead")
    from jackfield.bridge.chat_templates import ChatTemplate
    from jackfield.bridge.chats import plain, text_of  # jinja is read where there is a chat
    from jackfield.bridge.image_chats import parted, text_with_images

    template, marks = ChatTemplate(tokenizer, asked), None
    if asked.sanitize_control_tokens:
        messages = plain(messages) if images is None else parted(messages)
        marks = marks_for(tokenizer, template.literals, messages, asked)
        if marks is not None:
            messages, template = (
                marks.mark(messages),
                ChatTemplate(tokenizer, marks.settings(asked)),
            )
    if images is None:
        return text_of(messages, template), marks
    text = text_with_images(messages, template, images)
    return images.filled(text, None if marks is None else marks.opening), marks


def _read(
    text: str,
    read: Callable[[str], list[int]],
    vocab_size: int,
    most: int | None,
    of_images: int = 0,
) -> list[int]:
    """The tokens of a text, of which `of_images` stand for images. Raises PromptError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt has half a character in it: {error.reason}") from None
    end = _LONG * (most or len(text))
    while most is not None and end < len(text):
        count = len(read(text[:end]))
        if count > _SURE * most:
            begins = f"the first {end} of the prompt's {len(text)} characters are {count} tokens"
            if of_images:  # which nobody has written
                begins = (
                    f"the prompt has more than {most} tokens ({of_images} of them of its images)"
                )
            raise PromptError(
                f"{begins}, the model's context is {most}: shorten the prompt to at most "
                f"{most - 1} tokens"
            )
        end *= 4
    return _check_tokenizer(read(text), vocab_size)


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
                f"the prompt holds {quoted(token)}, which is no token id (0 to {vocab_size - 1})"
            )
    return list(prompt)
