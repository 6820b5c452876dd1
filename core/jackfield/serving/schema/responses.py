"""``POST /v1/responses``: a chat in other words, so that both go the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from jackfield.serving.errors import ApiError, refused
from jackfield.serving.schema.chat import (
    ChatRequest,
    ChosenFunction,
    Function,
    Message,
    Tool,
    ToolChoice,
    kind_of_choice,
)
from jackfield.serving.schema.common import (
    OWN,
    Body,
    JsonSchema,
    Names,
    PromptCacheOptions,
    ResponseFormat,
    Sampling,
    Seed,
    Short,
    Text,
    text_or_list,
)
from jackfield.serving.schema.items import Item

LOGPROBS = "message.output_text.logprobs"
MAX_ITEMS = 9_999  # messages of a chat, but for the instructions

Include = Literal[
    "message.output_text.logprobs",
    # of items that there are none of here
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip


class FunctionTool(Body):
    type: Literal["function"]
    name: Names
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: Names


class AllowedTools(Body):
    """Of the tools only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=128)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(mode)")]
    | Annotated[FunctionChoice, Tag("(function)")]
    | Annotated[AllowedTools, Tag("(allowed)")],
    Discriminator(kind_of_choice),
]


class Format(Body):
    """What the text must look like: anything, a JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    name: Names | None = None
    description: Short | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def of_chat(self) -> ResponseFormat:
        if self.type != "json_schema":
            for name, value in self.model_dump(exclude={"type"}, exclude_none=True).items():
                field = name.rstrip("_")
                raise refused(
                    f"text.format.{field} is {value!r:.80}, which only json_schema has",
                    f"text.format.{field}",
                )
            return ResponseFormat(type=self.type)
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if value is None:
                raise refused(f"text.format: json_schema needs {field}", f"text.format.{field}")
        schema = JsonSchema.model_validate(
            {"name": self.name, "schema": self.schema_, "strict": self.strict}
        )
        return ResponseFormat(type="json_schema", json_schema=schema)


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class AccessPrograms(Body):
    cyber: Literal["standard"] | None = None


class BackgroundOptions(Body):
    completion_window: Literal["soonest"] | None = None


class ImageOptions(Body):
    context_compression: Literal["auto", "disabled"] | None = None


class StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


#: a field of a chat -> the field here that it is made of
_FIELDS = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "n": "model",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}  # fmt: skip


class ResponsesRequest(Sampling):
    """Items of a conversation, and how it is to go on."""

    input: Annotated[
        Annotated[Text, Tag("(text)")]
        | Annotated[
            Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)], Tag("(list)")
        ],
        Discriminator(text_or_list),
    ]
    instructions: Text | None = None
    previous_response_id: Short | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Annotated[list[Include], Field(max_length=100)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, Short], Field(max_length=16)] | None = None
    prompt_cache_key: Short | None = None
    safety_identifier: Short | None = None

    # of jackfield
    seed: Seed | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # what changes nothing here, where it asks for nothing else
    access_programs: AccessPrograms | None = None
    background: Literal[False] | None = None
    background_options: BackgroundOptions | None = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    conversation: None = None
    image: ImageOptions | None = None
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None  # of tools that a server runs
    moderation: None = None
    prompt: None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        setting: _FIELDS.get(field, field) for setting, field in ChatRequest.NAMES.items()
    }

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat(self, messages: list[Message]) -> ChatRequest:
        """The chat that is asked for by this, of these messages. Raises ApiError."""
        if self.top_logprobs and not self.wants_logprobs:
            raise refused(f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options needs stream=true", "stream_options")
        wanted = None if self.text is None else self.text.format
        same = (
            "model", "temperature", "top_p", "user", "stream", "seed", "parallel_tool_calls",
            "chat_template_kwargs", "prompt_cache_key", "safety_identifier", "include_report", *OWN,
        )  # fmt: skip
        ended = bool(messages) and messages[-1].role == "assistant"
        return ChatRequest(
            messages=messages,
            add_generation_prompt=True if ended else None,  # what it says is another message
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            response_format=None if wanted is None else wanted.of_chat(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=self._tools(),
            tool_choice=self._tool_choice(),
            **{name: getattr(self, name) for name in same},
        )

    def _tools(self) -> list[Tool] | None:
        if self.tools is None:
            return None
        return [Tool(type="function", function=_function(tool)) for tool in self.tools]

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            functions = [
                {"type": "function", "function": {"name": tool.name}} for tool in choice.tools
            ]
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.mode, "tools": functions},
            }
        if isinstance(choice, FunctionChoice):
            return ToolChoice(type="function", function=ChosenFunction(name=choice.name))
        return choice


class RetrieveQuery(Body):
    """What may be asked of a stored response."""

    include: Annotated[list[Include], Field(max_length=100)] | None = None
    stream: Literal[False, "false"] | None = None
    include_obfuscation: Literal[False, "false"] | None = None


class ItemsQuery(Body):
    """Which of the items that it answers are listed."""

    after: Short | None = None
    include: Annotated[list[Include], Field(max_length=100)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def _function(tool: FunctionTool) -> Function:
    return Function(
        name=tool.name, description=tool.description, parameters=tool.parameters,
        strict=tool.strict,
    )  # fmt: skip


def in_fields_of_responses(error: ApiError) -> ApiError:
    """An error about a chat, about the fields here that the chat was made of."""
    if error.param is None:
        return error
    first, _, _ = error.param.partition(".")
    param = _FIELDS.get(first)
    if first in ("tools", "tool_choice"):
        inner = error.param.replace(".allowed_tools", "").replace(".function", "")
        param = inner.rstrip(".")
    if param is None:
        return error
    message = error.message.replace(first, param) if first in _FIELDS else error.message
    return ApiError(error.status, message, param=param, code=error.code)
