"""Fields that several endpoints have, and what they ask of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jackfield.serving.errors import refused
from jackfield.serving.schema.theirs import asks_for_nothing, instead_of_field, meant

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(max_length=2_000_000)]
DataUrl = Annotated[str, StringConstraints(max_length=48 * 2**20)]  # of an image
Short = Annotated[str, StringConstraints(max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Names = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]

#: Fields of ours that OpenAI's protocol does not have, by the engine's names.
OWN = (
    "top_k", "min_p", "repetition_penalty", "cache_salt", "adapter", "decoding", "regex", "grammar",
    "choices", "guidance_scale", "negative_prompt",
)  # fmt: skip


def text_or_list(value: Any) -> str:
    """The tag of what may be a text or a list, so that an error is about the one it is."""
    return "(list)" if isinstance(value, list) else "(text)"


class Body(BaseModel):
    """A body of a request: an unknown field is an error, and null is none, wherever it stands."""

    model_config = ConfigDict(extra="forbid", strict=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """As clients send back what they were told: every field that nobody filled is null."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class PromptCacheOptions(Body):
    """How a prompt is cached: as it is here for everybody."""

    mode: Literal["implicit"] | None = None
    prewarm: Literal[False] | None = None


class JsonSchema(Body):
    name: Names
    description: Short | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must look like: anything, a JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_its_schema(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("schema") is not None:
            raise PydanticCustomError(
                "schema_beside",
                "a schema stands in json_schema; write type json_schema, and json_schema with "
                "name and schema",
            )
        return data


class PlainMessage(Body):
    """A message that is a text."""

    role: Literal["system", "user", "assistant"]
    content: Text


class Sampling(Body):
    """How tokens are chosen. None, and a field that is not there, leave it to the model."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    user: Short | None = None
    stream: bool | None = False

    # of jackfield
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    cache_salt: Short | None = None
    adapter: Short | None = None
    decoding: Short | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choices: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    negative_prompt: (
        Annotated[
            Annotated[Text, Tag("(text)")]
            | Annotated[
                Annotated[list[PlainMessage], Field(min_length=1, max_length=10_000)], Tag("(list)")
            ],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    include_report: bool = False

    _meant: dict[str, Any] = PrivateAttr(default_factory=dict)  # by neutral fields of others

    @model_validator(mode="wrap")
    @classmethod
    def _answer_others(cls, data: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise ApiError for a field of another server that has another name, or none, here.

        One that asks for what is so anyway is taken, and is no more than what it means.
        """
        if not isinstance(data, dict):
            return validated(data)
        fields = cls.model_fields
        inert = {n: value for n, value in data.items() if asks_for_nothing(n, value, fields)}
        data = {name: value for name, value in data.items() if name not in inert}
        for name, value in data.items():
            if name in fields or value is None:
                continue
            if answer := instead_of_field(name, cls.NAMES, fields, value):
                raise refused(f"nothing here reads the field {name!r}; {answer}", name)
        made = validated(data)
        for name, value in inert.items():
            made._meant |= meant(name, value)
        return made

    #: engine setting -> field, for messages
    NAMES: ClassVar[Mapping[str, str]] = {
        "temperature": "temperature", "top_p": "top_p",
        **{name: name for name in OWN},
    }  # fmt: skip

    @property
    def names(self) -> Mapping[str, str]:
        """`NAMES`, where a grammar that this body does not write is made of what it does: of the
        schema of an answer beside tools, or of the tools.
        """
        if self.grammar is not None:
            return self.NAMES
        schema = self.NAMES.get("json_schema", "tools")
        of_answer = schema.partition(".")[0] in self.model_fields_set
        return {**self.NAMES, "grammar": schema if of_answer else "tools"}

    def asked(self) -> dict[str, Any]:
        """What the engine is asked for."""
        plain = ("temperature", "top_p", *OWN)
        found = {name: getattr(self, name) for name in plain}
        if isinstance(self.negative_prompt, list):
            found["negative_prompt"] = [one.model_dump() for one in self.negative_prompt]
        return self._meant | {name: value for name, value in found.items() if value is not None}


class Penalized(Sampling):
    """The fields that both kinds of completions have."""

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: Seed | None = None
    stop: (
        Annotated[
            Annotated[str, Field(min_length=1, max_length=1024), Tag("(text)")]
            | Annotated[
                list[Annotated[str, Field(min_length=1, max_length=1024)]],
                Field(max_length=16),
                Tag("(list)"),
            ],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    stream_options: StreamOptions | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        **Sampling.NAMES,
        "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
        "sequence_bias": "logit_bias", "num_return_sequences": "n", "seed": "seed",
        "stop": "stop", "stop_strings": "stop", "logprobs": "logprobs",
    }  # fmt: skip

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options needs stream=true", "stream_options")
        return self.stream_options is not None and self.stream_options.include_usage

    def asked(self) -> dict[str, Any]:
        found = super().asked()
        for name in ("frequency_penalty", "presence_penalty"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.seed is not None:
            found["seed"] = self.seed if self.seed == -1 else self.seed % 2**63
        if self.stop:
            found["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            found["sequence_bias"] = [[[_token(k)], v] for k, v in self.logit_bias.items()]
        if self.samples > 1:
            found["num_return_sequences"] = self.samples
        return found


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise refused(f"logit_bias: {text!r} is no token id", "logit_bias")
    return int(text)


def structure(wanted: ResponseFormat | None, param: str) -> dict[str, Any]:
    """The setting that makes the text what `wanted` says."""
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.json_schema is None:
        raise refused(f"{param}: type json_schema needs json_schema", f"{param}.json_schema")
    schema = wanted.json_schema.schema_
    return {"json_schema": {"type": "object"} if schema is None else schema}


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def as_json(value: Any) -> str:
    """JSON as it goes over the wire."""
    return _ENCODER.encode(value)
