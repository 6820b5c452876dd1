"""OpenAI's batch format: a line that asks, and the line that answers it.

The format is that of https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jackfield.serving.errors import ApiError, of_validation, refused
from jackfield.serving.schema.common import Body, Short

Json = dict[str, Any]


class Line(Body):
    """What one line asks: the body of a POST to one of the server's endpoints."""

    custom_id: Annotated[Short, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: Json


def custom_id_of(value: Any) -> str:
    """The id of what a line says, whatever else is wrong with it. Raises ApiError."""
    if not isinstance(value, Mapping):
        raise refused("the line is no JSON object", None)
    found = value.get("custom_id")
    if not isinstance(found, str) or not found:
        raise refused("the line has no custom_id; give it a text that no other has", "custom_id")
    return found


def read_line(value: Mapping[str, Any]) -> Line:
    """Raises ApiError, that which stands in the place of a body too."""
    if isinstance(why := value.get("body"), ApiError):
        raise why
    try:
        return Line.model_validate(value)
    except ValidationError as error:
        raise of_validation(error.errors()) from None


def key_of(custom_id: str) -> bytes:
    """What stands for an id in memory: ids may be long, and there may be many."""
    return hashlib.sha256(custom_id.encode()).digest()[:16]


def answered(name: str, custom_id: str, body: Json) -> Json:
    """The line of the output for an answer; `name` is that of the request."""
    return {
        "id": f"batch_req_{name}", "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": name, "body": body}, "error": None,
    }  # fmt: skip


def failed(name: str, custom_id: str | None, number: int, error: ApiError, *, asked: bool) -> Json:
    """The line of the errors for line `number` of the input.

    `asked`: it got as far as an endpoint, so that there is a response, too.
    """
    response = {"status_code": error.status, "request_id": name, "body": error.body()}
    return {
        "id": f"batch_req_{name}", "custom_id": custom_id, "response": response if asked else None,
        "error": {
            "code": error.code or ("request_failed" if asked else "invalid_line"),
            "message": f"line {number}: {error.message}", "param": error.param, "line": number,
        },
    }  # fmt: skip


def may_succeed(record: Json) -> bool:
    """Whether what failed may be answered another time: it was not the line's fault."""
    response = record["response"]
    return response is not None and int(response["status_code"]) >= 500
