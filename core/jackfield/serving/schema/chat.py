"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from jackfield.serving.errors import refused
from jackfield.serving.schema.common import (
    Body,
    DataUrl,
    Names,
    Penalized,
    PromptCacheOptions,
    ResponseFormat,
    Short,
    Text,
    structure,
    text_or_list,
)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    """An image, as a data URL; nothing is fetched."""

    url: DataUrl
    detail: Literal["auto"] | None = None


_AN_IMAGE = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl

    @model_validator(mode="before")
    @classmethod
    def _as_a_url(cls, data: Any) -> Any:
        """An image in bytes is a data URL, whatever its field is called."""
        given = data.get("image_url") if isinstance(data, dict) else None
        if isinstance(data, dict) and not (isinstance(given, ImageUrl) or _has_url(given)):
            raise PydanticCustomError("image_form", f"an image is a data URL: {_AN_IMAGE}")
        return data


def _has_url(given: Any) -> bool:
    return isinstance(given, Mapping) and "url" in given and "base64" not in given


_PARTS = {"text": "(part)", "image_url": "(image)"}


def _kind_of_part(value: Any) -> str | None:
    """The tag of a part."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return _PARTS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("(part)")] | Annotated[ImagePart, Tag("(image)")],
    Discriminator(
        _kind_of_part,
        custom_error_type="kind_of_part",
        custom_error_message="a part is of type text, or of type image_url where the model reads "
        f"images: {_AN_IMAGE}",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[Annotated[list[Part], Field(max_length=10_000)], Tag("(list)")],
    Discriminator(text_or_list),
]


class FunctionCall(Body):
    name: Names
    arguments: Text


class ToolCall(Body):
    id: Short
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # as it comes in streams


class Message(Body):
    """A message of a conversation; content is a text, or parts that are texts and images."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000)] | None = None
    tool_call_id: Short | None = None
    reasoning_content: Text | None = None
    refusal: Annotated[str, StringConstraints(max_length=0)] | None = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template has it."""
        found = self.model_dump(exclude_none=True, exclude={"refusal": True})
        if self.role == "developer":
            found["role"] = "system"
        for call in found.get("tool_calls", ()):
            call.pop("index", None)
        if self.content is None:
            found["content"] = None
        return found


class Function(Body):
    name: Names
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: Names


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedFunction(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(min_length=1, max_length=128)]


class AllowedTools(Body):
    """Of the tools only these may be called; the model is told of no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def kind_of_choice(value: Any) -> str:
    """The tag of what `tool_choice` is, so that an error is about the one that was meant."""
    if isinstance(value, str):
        return "(mode)"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "(allowed)" if kind == "allowed_tools" else "(function)"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(mode)")]
    | Annotated[ToolChoice, Tag("(function)")]
    | Annotated[AllowedTools, Tag("(allowed)")],
    Discriminator(kind_of_choice),
]


class ChatRequest(Penalized):
    """A conversation, and how it is to go on."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    # of others, and of jackfield
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1000)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    # what changes nothing here, where it asks for nothing else
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None
    metadata: Annotated[dict[str, Short], Field(max_length=16)] | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: Short | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        **Penalized.NAMES,
        "max_new_tokens": "max_completion_tokens", "max_length": "max_completion_tokens",
        "json_schema": "response_format", "tools": "tools", "tool_choice": "tool_choice",
        "documents": "documents",
        "chat_template_kwargs": "chat_template_kwargs",
        "continue_final_message": "continue_final_message",
        "add_generation_prompt": "add_generation_prompt",
    }  # fmt: skip

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called. Raises ApiError for one that is allowed and not there."""
        if self.tools is None or not isinstance(self.tool_choice, AllowedTools):
            return self.tools or []
        allowed = [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        there = {tool.function.name for tool in self.tools}
        for at, name in enumerate(allowed):
            if name not in there:
                raise refused(
                    f"tool_choice allows {name!r}, which is none of the tools",
                    f"tool_choice.allowed_tools.tools.{at}.function.name",
                )
        return [tool for tool in self.tools if tool.function.name in allowed]

    @property
    def choice(self) -> str | dict[str, Any]:
        """What is said of calls of those that are offered."""
        match self.tool_choice:
            case AllowedTools(allowed_tools=allowed):
                return allowed.mode
            case ToolChoice() as one:
                return one.model_dump()
            case mode:
                return mode or "auto"

    @property
    def most(self) -> int | None:
        """How many tokens are wanted at most."""
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise refused(
                "max_tokens is the old name of max_completion_tokens; give one", "max_tokens"
            )
        return self.max_completion_tokens or self.max_tokens

    def asked(self) -> dict[str, Any]:
        found = super().asked()
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs=true", "top_logprobs")
        if self.logprobs:
            found["logprobs"] = self.top_logprobs or 0
        found.update(structure(self.response_format, "response_format"))
        for name in ("continue_final_message", "add_generation_prompt", "documents"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.prompt_cache_key is not None:
            found.setdefault("cache_salt", self.prompt_cache_key)
        return found
