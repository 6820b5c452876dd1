"""The errors by which one text ends while others go on, and which of them its request brings on."""

from __future__ import annotations

FORBIDDEN = "no token can be chosen: its settings forbid every token"
NOT_NUMBERS = "no token can be chosen: the logits are not numbers"

_STRUCTURE = "its structure cannot be followed"
_COMPLETE = "its structure is complete after"
_FOUND = "the search found"
#: what of a request failed -> how that is told; all else is told by its own name
_FAILED = {"text": "its tokens do not decode", "structure": _STRUCTURE}


def failed(what: str, why: str) -> str:
    """The error of a request whose `what` failed."""
    return f"{_FAILED.get(what, f'its {what} failed')}: {why}"


def complete_too_soon(tokens: int, least: int) -> str:
    """The error of a text that must end, and may not yet."""
    return f"{_COMPLETE} {tokens} tokens, and min_new_tokens={least}"


def too_few_texts(found: int, wanted: int) -> str:
    """The error of a text that a search was to find beside others."""
    return f"{_FOUND} {found} texts, and {wanted} were asked for"


def of_structure(error: str) -> bool:
    """Whether what the text must look like is, or may be, why it ended."""
    return error.startswith((FORBIDDEN, _STRUCTURE, _COMPLETE))


def of_request(error: str) -> bool:
    """Whether the request's settings brought it on; else the model or a plugin did."""
    return of_structure(error) or error.startswith(_FOUND)
