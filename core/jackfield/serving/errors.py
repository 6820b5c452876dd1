"""What a client is told when something is wrong: OpenAI's error shape, whatever raised it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from jackfield.errors import (
    CacheFullError,
    JackfieldError,
    PromptError,
    QueueFullError,
    SettingsError,
    UsageError,
    error_text,
    shown,
)
from jackfield.requests.text_errors import of_request, of_structure

logger = logging.getLogger("jackfield.serving")

RETRY_AFTER = 1  # seconds after which a client that was turned away may ask again
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}

#: What the engine advises, where a request says it otherwise.
_WORDS = {
    "set do_sample=True or temperature, or num_beams": "give temperature",
    "offer it with jackfield.load(decoding={'name': 'plugin:…'})": (
        "offer it with `jackfield serve --decoding`, or in the server's file"
    ),
    "or load with a larger max_waiting": "or raise the server's max_waiting",
    "or load with the host in image_hosts": "or have the server allow the host (image_hosts)",
}


#: Fields of requests that can forbid tokens, the most likely first.
_CONFINING = (
    "response_format", "text", "regex", "grammar", "choices", "tool_choice", "tools", "logit_bias",
)  # fmt: skip


#: Kinds of mistakes -> the field of what they are told of that they are about.
_FIELD_OF = {"image_form": ".image_url", "kind_of_part": ".type"}


class ApiError(Exception):
    """An answer that is an error: its HTTP status, what is wrong, and the field that it is about.

    `param` is the path of a field of the body (``messages.0.content``) or None; `code` is for
    programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = RETRY_AFTER,
    ) -> None:
        super().__init__(message)
        self._retry_after = retry_after
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> tuple[Any, ...]:
        more: dict[str, Any] = {
            "param": self.param,
            "code": self.code,
            "retry_after": self._retry_after,
        }
        return partial(ApiError, **more), (self.status, self.message)

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        seconds = str(math.ceil(self._retry_after))
        return {"Retry-After": seconds} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip


def refused(message: str, param: str | None, code: str | None = None) -> ApiError:
    """The caller's mistake, in the field `param`."""
    return ApiError(400, message, param=param, code=code)


def told(error: Exception) -> ApiError:
    """The answer to what was raised while one is made; a fault of our own goes into the log."""
    if isinstance(error, ApiError):
        return error
    logger.error("an answer failed", exc_info=error)
    return ApiError(500, f"the server failed: {error_text(error)}", code="internal_error")


def as_api_error(
    error: BaseException, model: str, names: Mapping[str, str], prompt: str
) -> ApiError:
    """The answer to what the engine of `model` raised when it was asked.

    `names` maps the engine's settings to the fields of this request, `prompt` is the field with the
    prompt: what the message is about becomes `param`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, in_fields(str(error), {}), code="queue_full")
    if isinstance(error, SettingsError | PromptError | CacheFullError):
        field = field_in(str(error), names)
        if field is None and not isinstance(error, SettingsError):
            field = prompt
        long = isinstance(error, CacheFullError) or "context" in str(error)
        said = in_fields(str(error), names)
        return refused(said, field, "context_length_exceeded" if long else None)
    return broken(error, model)


def broken(error: BaseException, model: str) -> ApiError:
    """The answer to what the engine of `model` raised, of which the request is not the cause."""
    if isinstance(error, ApiError):
        return error
    if type(error) is UsageError:  # the engine was closed meanwhile
        return ApiError(503, f"{model}: {error}", code="unavailable")
    text = str(error) if isinstance(error, JackfieldError) else error_text(error)
    return ApiError(500, f"{model}: {text}", code="engine_failed")


def of_text(error: str, model: str, names: Mapping[str, str], given: Collection[str]) -> ApiError:
    """The answer where one text ended by an error; `given` are the fields that the request has.

    A request that forbids nothing is not why every token is forbidden.
    """
    field = None
    if of_structure(error):
        field = next((name for name in _CONFINING if name in given), None)
    elif of_request(error):
        field = names.get("num_return_sequences")
    if field is None:
        return ApiError(500, f"{model}: {error}", code="engine_failed")
    return refused(in_fields(error, names), field)


def in_fields(message: str, names: Mapping[str, str]) -> str:
    """A message of the engine in the words of the request."""
    for words, ours in _WORDS.items():
        message = message.replace(words, ours)
    for name, field in names.items():
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", field, message)
    return message


def field_in(message: str, names: Mapping[str, str]) -> str | None:
    """The field that a message of the engine is about: the first of its settings in there."""
    found = (
        (match.start(), field)
        for name, field in names.items()
        if (match := re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message))
    )
    return min(found, default=(0, None))[1]


def of_validation(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """The answer to a body that is not as the schema says: of its first mistake.

    Of several forms that a field may have, the one that was meant got furthest.
    """
    found = [(tuple(str(p) for p in e.get("loc", ()) if p != "body"), e) for e in errors]
    path, first = max((f for f in found if f[0][:2] == found[0][0][:2]), key=lambda f: len(f[0]))
    # what stands between are names of alternatives, which a client has not written
    param = ".".join(part for part in path if not re.search(r"[\[\](-]|^function-", part))
    param += _FIELD_OF.get(str(first.get("type")), "")
    kind, what = first.get("type"), str(first.get("msg", "is wrong"))
    if kind == "json_invalid":
        return refused(f"the body is not JSON: {shown(what)}", None)
    if kind == "missing" and not param:
        return refused("there is no body; send one, as JSON", None)
    if kind in ("extra_forbidden", "none_required"):
        what = f"nothing here reads the field {param!r}; drop it"
    return refused(f"{param or 'the body'}: {shown(what, 500)}", param or None)
