"""From what a caller calls a prompt (text, token ids, chat messages) to token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from jackfield.errors import JackfieldError, PromptError, first_line, quoted
from jackfield.foreign import named
from jackfield.requests.habits import PROMPTS
from jackfield.requests.turns import UNSAID, Turn

#: A string, a list of token ids, or a list of chat messages ({"role": …, "content": …}). What a
#: tokenizer of transformers returns is one too, or several.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_BYTES = bytes | bytearray | memoryview
_NO_LOCK = contextlib.nullcontext()
_IDS = "input_ids"
_MASK = "attention_mask"

#: Text that is this many times longer than the context is looked at piece by piece, …
_LONG = 16  # characters a token
_SURE = 2  # … and refused where a beginning has this many times too many tokens


P = ParamSpec("P")
T = TypeVar("T")


def _told(act: Callable[P, T]) -> Callable[P, T]:
    """Whatever an odd object or a tokenizer raises is told as the prompt's."""

    @wraps(act)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(*args, **kwargs)
        except JackfieldError:
            raise
        except Exception as error:
            raise PromptError(f"the prompt cannot be read: {first_line(error)[:500]}") from error

    return told


@_told
def encode(
    prompt: Prompt,
    tokenizer: Any | None,
    vocab_size: int,
    most: int | None = None,
    lock: contextlib.AbstractContextManager[Any] = _NO_LOCK,
    turn: Turn = UNSAID,
) -> list[int]:
    """Token ids of `prompt`. Raises PromptError, early where there are far more than `most`.

    `turn` says how a chat ends; it asks for nothing where the prompt is none.
    `lock` is held while `tokenizer` is called, and not while its chat template is at work.
    """

    def read(text: str, **how: bool) -> list[int]:
        reads = _need(tokenizer)
        with lock, named("the prompt cannot be read", PromptError):  # also where Rust panics
            return list(reads(text, **how)["input_ids"])

    if not _is_chat(prompt):
        turn.refuse_without_chat()
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
    if isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence):
        raise PromptError(
            "a prompt is a string, a list of token ids or a list of chat messages, not "
            f"{type(prompt).__name__}"
        )
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token or message")
    if _is_chat(prompt):
        ids = _read(
            _chat(prompt, _need(tokenizer), turn.of(prompt)),
            partial(read, add_special_tokens=False),
            vocab_size,
            most,
        )
        if not ids:
            raise PromptError("the chat template makes no token of these messages; give plain text")
        return ids
    return _check_ids(prompt, vocab_size)


def _is_chat(prompt: Any) -> bool:
    sequence = isinstance(prompt, Sequence) and not isinstance(prompt, str | _BYTES)
    return sequence and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts rather than one prompt."""
    if isinstance(prompts, str | _BYTES) or not isinstance(prompts, Sequence):
        return False
    return not prompts or not isinstance(prompts[0], int | Mapping)


@_told
def taken(prompts: Any, settings: dict[str, Any]) -> Any:
    """`prompts` as strings, lists of ids and messages, also where they come as transformers' own.

    That is a tensor or an array with a row for each prompt, or what a tokenizer returns: a mapping
    with `input_ids` and an `attention_mask`, which may also be among the `settings`, out of which
    it is taken, as are prompts under another of their names. Rows are cut by the mask, which must
    be padding at the left. Raises PromptError.
    """
    for name in PROMPTS:
        if (named := settings.pop(name, None)) is not None:
            if prompts is not None:
                raise PromptError(f"there is a prompt and {name} beside it; give one of the two")
            prompts = named
    given = {k: settings.pop(k) for k in (_IDS, _MASK, "token_type_ids") if k in settings}
    if isinstance(prompts, Mapping):
        if _IDS not in prompts:
            raise PromptError(
                f"a prompt that is a {type(prompts).__name__} has input_ids, as a tokenizer "
                "returns it; a chat is a list of messages"
            )
        given, prompts = {**prompts, **given}, None
    ids = given.pop(_IDS, None)
    if prompts is not None and ids is not None:
        raise PromptError("there is a prompt and input_ids beside it; give one of the two")
    kinds = given.pop("token_type_ids", None)
    if kinds is not None and not _zeros(_listed(kinds)):
        raise PromptError("nothing here reads token_type_ids; drop them")
    mask = given.pop(_MASK, None)
    if given:
        raise PromptError(f"nothing here reads {', '.join(map(repr, given))} of a prompt; drop it")
    prompts = _listed(prompts if ids is None else ids)
    if mask is not None and prompts is None:
        raise PromptError("there is an attention_mask and no prompt; it stands beside input_ids")
    return prompts if mask is None else _cut(prompts, _listed(mask))


def _listed(value: Any) -> Any:
    """A tensor or an array as lists; a row of one that was a batch stays a row."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, _BYTES) else value


def _zeros(value: Any, depth: int = 2) -> bool:
    """Whether rows, or one row, are of zeros alone."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(_zeros(_listed(part), depth - 1) for part in value)
    return isinstance(value, int) and value == 0


def _cut(prompts: Any, mask: Any) -> Any:
    """Rows without what the mask says is padding."""
    if not is_batch(prompts):
        return _row(0, prompts, mask)
    if not isinstance(mask, Sequence) or len(mask) != len(prompts):
        raise PromptError(f"attention_mask must have {len(prompts)} rows, as input_ids has")
    pairs = zip(prompts, mask, strict=True)
    return [_row(n, _listed(row), _listed(own)) for n, (row, own) in enumerate(pairs)]


def _row(number: int, ids: Any, mask: Any) -> list[Any]:
    if isinstance(ids, str) or not isinstance(mask, Sequence) or len(mask) != len(ids):
        raise PromptError(f"row {number}: attention_mask must have as many columns as input_ids")
    if any(bit not in (0, 1) for bit in mask):
        raise PromptError(f"row {number}: attention_mask must be of 0 and 1")
    start = next((at for at, bit in enumerate(mask) if bit), len(mask))
    if start == len(mask):
        raise PromptError(f"row {number}: attention_mask leaves no token of it")
    if not all(mask[start:]):
        where = "holes" if mask[-1] else "padding at the right"
        raise PromptError(
            f"row {number}: attention_mask has {where}; tokenize with padding_side='left', or give "
            "lists of token ids without padding"
        )
    return list(ids[start:])


def _need(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer, so prompts must be lists of token ids; give "
            "jackfield.load a tokenizer to use text"
        )
    return tokenizer


def _chat(messages: Sequence[Any], tokenizer: Any, turn: Turn) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template; give plain text instead")
    from jackfield.bridge.chat_templates import ChatTemplate
    from jackfield.requests.chats import text_of  # jinja is read where there is a chat

    how = {"begins": bool(turn.begins), "continues": bool(turn.continues)}
    return text_of(messages, ChatTemplate(tokenizer, **how))


def _read(
    text: str, read: Callable[[str], list[int]], vocab_size: int, most: int | None
) -> list[int]:
    """The tokens of a text. Raises PromptError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt has half a character in it: {error.reason}") from None
    end = _LONG * (most or len(text))
    while most is not None and end < len(text):
        count = len(read(text[:end]))
        if count > _SURE * most:
            raise PromptError(
                f"the first {end} of the prompt's {len(text)} characters are {count} tokens, the "
                f"model's context is {most}: shorten the prompt to at most {most - 1} tokens"
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
