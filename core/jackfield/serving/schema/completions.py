"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from jackfield.serving.errors import refused
from jackfield.serving.schema.common import Penalized, ResponseFormat, Text, structure

Token = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Token], Field(min_length=1)]


class CompletionRequest(Penalized):
    """A text, or several, or their token ids, and how they are to go on."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=1024)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=1024)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: None = None
    response_format: ResponseFormat | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        **Penalized.NAMES,
        "max_new_tokens": "max_tokens", "json_schema": "response_format",
    }  # fmt: skip

    @property
    def prompts(self) -> list[Any]:
        """Each prompt: a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def asked(self) -> dict[str, Any]:
        found = super().asked()
        if self.best_of is not None and self.best_of != self.samples:
            raise refused(
                f"best_of={self.best_of}: texts are not ranked here; leave it out, or give n",
                "best_of",
            )
        if self.echo and self.logprobs is not None:
            raise refused("echo with logprobs: prompts have no log-probabilities here", "echo")
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        found.update(structure(self.response_format, "response_format"))
        found["max_new_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        if self.max_tokens == 0 and not self.echo:
            raise refused(
                "max_tokens=0 asks for nothing but the prompt; give echo=true, or more tokens",
                "max_tokens",
            )
        return found
