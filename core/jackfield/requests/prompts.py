"""What a caller calls a prompt: text, token ids, chat messages, or what a tokenizer returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from jackfield.errors import JackfieldError, PromptError, first_line
from jackfield.requests.features import check_text_alone, features_in
from jackfield.requests.habits import PROMPTS

#: A string, a list of token ids, or a list of chat messages ({"role": …, "content": …}). What a
#: tokenizer of transformers returns is one too, or several, and so is what a processor returns of a
#: sound or an image: {"input_features": …}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]

BYTES = bytes | bytearray | memoryview
_IDS = "input_ids"
_MASK = "attention_mask"
#: Which of several texts, or of a text and its images, each token is of: all of the first, or not.
_KINDS = ("token_type_ids", "mm_token_type_ids")

P = ParamSpec("P")
T = TypeVar("T")


def as_prompt_error(act: Callable[P, T]) -> Callable[P, T]:
    """Whatever an odd object or a tokenizer raises is reported as the prompt's."""

    @wraps(act)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(*args, **kwargs)
        except JackfieldError:
            raise
        except Exception as error:
            raise PromptError(f"the prompt cannot be read: {first_line(error)[:500]}") from error

    return guarded


def is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts rather than one prompt."""
    if isinstance(prompts, str | BYTES) or not isinstance(prompts, Sequence):
        return False
    return not prompts or not isinstance(prompts[0], int | Mapping)


@as_prompt_error
def taken(prompts: Any, settings: dict[str, Any], reads: str | None = None) -> Any:
    """`prompts` as strings, lists of ids and messages, also where they come as transformers' own.

    That is a tensor or an array with a row for each prompt, or what a tokenizer returns: a mapping
    with `input_ids` and an `attention_mask`, which may also be among the `settings`, out of which
    it is taken, as are prompts under another of their names. Rows are cut by the mask, which must
    be padding at the left. Features become `FeaturesPrompt`s; `reads` is what the model calls
    them. Raises PromptError.
    """
    for name in PROMPTS:
        if (named := settings.pop(name, None)) is not None:
            if prompts is not None:
                raise PromptError(f"there is a prompt and {name} beside it; give one of the two")
            prompts = named
    if (features := features_in(prompts, settings, reads)) is not None:
        return features
    given = {k: settings.pop(k) for k in (_IDS, _MASK, *_KINDS) if k in settings}
    if _IDS in given:
        check_text_alone(name for name, value in settings.items() if value is not None)
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
    kinds = {name: given.pop(name) for name in _KINDS if name in given}
    mask = given.pop(_MASK, None)
    given = {name: value for name, value in given.items() if value is not None}
    told = {name: value for name, value in kinds.items() if value is not None}
    unread = [name for name, value in told.items() if not _zeros(listed(value))]
    check_text_alone([*given, *unread])
    if unread:
        raise PromptError(f"nothing here reads {unread[0]}; drop them")
    if given:
        raise PromptError(f"nothing here reads {', '.join(map(repr, given))} of a prompt; drop it")
    prompts = listed(prompts if ids is None else ids)
    if mask is not None and _is_text(prompts):
        raise PromptError(
            "attention_mask stands beside token ids, and a text has no padding; drop it"
        )
    if mask is not None and prompts is None:
        raise PromptError("there is an attention_mask and no prompt; it stands beside input_ids")
    return prompts if mask is None else _cut(prompts, listed(mask))


def _is_text(prompts: Any) -> bool:
    """Whether it is a text, or several, or a chat."""
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return isinstance(prompts, str) or isinstance(first, str | Mapping)


def listed(value: Any) -> Any:
    """A tensor or an array as lists; a row of one that was a batch stays a row."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, BYTES) else value


def _zeros(value: Any, depth: int = 2) -> bool:
    """Whether rows, or one row, are of zeros alone."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(_zeros(listed(part), depth - 1) for part in value)
    return isinstance(value, int) and value == 0


def _cut(prompts: Any, mask: Any) -> Any:
    """Rows without what the mask says is padding."""
    if not is_batch(prompts):
        return _row(0, prompts, mask)
    if not isinstance(mask, Sequence) or len(mask) != len(prompts):
        raise PromptError(f"attention_mask must have {len(prompts)} rows, as input_ids has")
    pairs = zip(prompts, mask, strict=True)
    return [_row(n, listed(row), listed(own)) for n, (row, own) in enumerate(pairs)]


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
