"""The flags that several commands share: dataclasses that a command takes as one argument each."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from jackfield.cli.files import decoded, read_file
from jackfield.errors import UsageError, first_line, shown

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

_MODEL = "A hub id, a folder, a GGUF file, or demo."
ModelOption = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
#: --model names it as well, see `with_flags`.
_BY_PLACE = typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)
ModelArgument = Annotated[str, _BY_PLACE]
OptionalModel = Annotated[str | None, _BY_PLACE]
_ModelNamed = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as MODEL.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output and nothing else.")
]


def _backend(kind: str, *flags: str) -> Any:
    text = f"The {kind} backend, auto without it; give it again for fallbacks."
    return typer.Option(*flags, metavar="NAME", help=text)


def flag(name: str, metavar: str, text: str, *others: str) -> Any:
    """A flag that takes a value; `others` are what else it is called."""
    return typer.Option(name, *others, metavar=metavar, help=text)


@dataclass(frozen=True)
class Backends:
    """Which backends run a model, and where."""

    attention: Annotated[
        list[str] | None, _backend("attention", "--attention", "--attn-implementation")
    ] = None
    cache: Annotated[list[str] | None, _backend("cache", "--cache", "--cache-implementation")] = (
        None
    )
    quantizer: Annotated[list[str] | None, _backend("quantizer", "--quantization")] = None
    compiler: Annotated[list[str] | None, _backend("compiler", "--compile")] = None
    decoding: Annotated[list[str] | None, _backend("decoding", "--decoding")] = None
    assistant_model: Annotated[
        str | None,
        flag("--assistant-model", "MODEL", "Draft model for --decoding assisted, e.g. demo-draft."),
    ] = None
    scheduler: Annotated[list[str] | None, _backend("scheduler", "--scheduler")] = None
    kernel: Annotated[
        list[str] | None,
        flag("--kernel", "NAME", "A fused layer in place of the model's own, or none; repeatable."),
    ] = None
    dtype: Annotated[
        str, flag("--dtype", "DTYPE", "auto, or a name such as bfloat16.", "--torch-dtype")
    ] = "auto"
    device: Annotated[
        str,
        flag(
            "--device",
            "DEVICE",
            "auto, balanced, a device, or MODULE=DEVICE,=DEVICE.",
            "--device-map",
        ),
    ] = "auto"
    max_memory: Annotated[
        str | None, flag("--max-memory", "SIZES", "For weights: cpu=4GB,0=10GB.")
    ] = None
    offload_folder: Annotated[
        str | None, flag("--offload-folder", "FOLDER", "Where weights on disk are written.")
    ] = None
    adapter: Annotated[
        str | None, flag("--adapter", "ADAPTER", "A LoRA adapter of PEFT: a folder or hub id.")
    ] = None
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Add the adapter into the weights.")
    ] = False
    adapters: Annotated[
        str | None,
        flag("--adapters", "NAME=ADAPTER", "LoRAs that requests may name: fr=FOLDER,de=FOLDER."),
    ] = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits, whatever else runs; slower.")
    ] = False
    tp_size: Annotated[
        int | None, flag("--tp", "N", "How many processes share the model; starts the others.")
    ] = None
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With --tp: hand experts out as a whole.")
    ] = False
    locked: Annotated[
        str | None, flag("--locked", "FILE", "Run what `jackfield lock` wrote there, or nothing.")
    ] = None
    profile: Annotated[
        str | None,
        flag("--profile", "FILE", "What `jackfield tune` found, for all that is not named."),
    ] = None
    revision: Annotated[
        str | None, flag("--revision", "REV", "Branch, tag or commit of a hub model.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `jackfield.load` and `jackfield.plan`."""
        from jackfield.planning.solving import ARGUMENTS

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {name: _selectable(given.pop(kind)) for kind, name in ARGUMENTS.items()}
        device, sizes = given.pop("device"), given.pop("max_memory")
        adapters = given.pop("adapters")
        return {
            **found,
            **given,
            "device_map": _device_map(device),
            "adapters": _pairs("--adapters", adapters) if adapters else None,
            "max_memory": _pairs("--max-memory", sizes) if sizes else None,
        }


def _device_map(text: str) -> str | int | dict[str, str]:
    """A number is a CUDA device, as in Python."""
    if text.isascii() and text.isdigit():
        return int(text)
    return _pairs("--device", text) if "=" in text else text


def _pairs(flag: str, text: str) -> dict[str, str]:
    """'cpu=4GB,0=10GB' as a dict. Raises UsageError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, mark, value = map(str.strip, part.partition("="))
        if not mark or not value:
            raise UsageError(f"cannot read {flag} {text!r}: write {flag} NAME=VALUE,NAME=VALUE")
        if key in found:
            raise UsageError(f"{flag} names {key!r} twice; name it once")
        found[key] = value
    return found


def _selectable(names: list[str] | None) -> str | list[str]:
    if not names:
        return "auto"
    return names[0] if len(names) == 1 else names


@dataclass(frozen=True)
class Batches:
    """How much a step does at once, what may be fetched, whether first steps are compared."""

    max_batch_size: Annotated[
        int | None,
        flag("--max-batch-size", "N", "How many run together at most; 32 without it."),
    ] = None
    max_batch_tokens: Annotated[
        int | None, flag("--max-batch-tokens", "N", "How many tokens a step computes at most.")
    ] = None
    image_hosts: Annotated[
        list[str] | None,
        flag("--image-host", "HOST", "Fetch images of chats from there; repeatable."),
    ] = None
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare the first steps with the model computed again."),
    ] = False

    def arguments(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "image_hosts": self.image_hosts or None}


@dataclass(frozen=True)
class Answers:
    """What requests in OpenAI's protocol are answered with where they leave it open."""

    max_completion_tokens: Annotated[
        int | None,
        flag("--max-completion-tokens", "N", "How long an answer may be where nobody says."),
    ] = None
    default_seed: Annotated[
        int | None, flag("--default-seed", "N", "The seed of requests that have none.")
    ] = None
    reasoning: Annotated[
        str | None, flag("--reasoning", "MODE", "auto, on or off, for templates that know it.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, flag("--chat-template-kwargs", "JSON", "What chat templates are given.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Settings of a server. Raises UsageError for what is no JSON."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found = {name: value for name, value in found.items() if value is not None}
        if text := found.get("chat_template_kwargs"):
            try:
                found["chat_template_kwargs"] = json.loads(text)
            except ValueError:
                raise UsageError(f"--chat-template-kwargs {text!r} is not JSON") from None
        return found


def load(model: str, backends: Backends, batches: Batches) -> Engine:
    """The engine that the flags ask for."""
    from jackfield.api import load

    return load(model, **backends.arguments(), **batches.arguments())


@dataclass(frozen=True)
class Settings:
    """How tokens are chosen, under the names of transformers' `GenerationConfig`."""

    max_new_tokens: Annotated[
        int | None, flag("--max-new-tokens", "N", "How many tokens to make at most.")
    ] = None
    do_sample: Annotated[
        bool | None,
        typer.Option("--do-sample/--no-do-sample", help="Sample, or take the likeliest token."),
    ] = None
    temperature: Annotated[
        float | None, flag("--temperature", "T", "Sample; 0 takes the likeliest token.")
    ] = None
    top_k: Annotated[int | None, flag("--top-k", "K", "Sample from the K likeliest.")] = None
    top_p: Annotated[
        float | None, flag("--top-p", "P", "Sample from the likeliest that sum to P.")
    ] = None
    min_p: Annotated[
        float | None, flag("--min-p", "P", "Drop tokens below P times the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None, flag("--repetition-penalty", "X", "Above 1: avoid what was said.")
    ] = None
    seed: Annotated[int | None, flag("--seed", "N", "The same seed draws the same text.")] = None
    stop: Annotated[
        list[str] | None, flag("--stop", "TEXT", "End before this text; repeatable.")
    ] = None
    tools: Annotated[
        Path | None,
        flag("--tools", "FILE", "Functions that a chat model may call, as JSON."),
    ] = None
    extra: Annotated[
        list[str] | None,
        flag("--set", "KEY=VALUE", "Any other setting, the value as JSON; repeatable."),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """The settings that were given. Raises UsageError where one is given twice."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        found = {key: value for key, value in given.items() if value is not None}
        if self.tools is not None:
            found["tools"] = _tools(self.tools)
        for text in self.extra or ():
            key, value = assignment(text)
            if key in found:
                raise UsageError(f"the setting {key!r} is given twice; give it once")
            found[key] = value
        return found


def _tools(file: Path) -> Any:
    text = decoded(read_file(file), shown(file))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--tools {shown(file)} is not JSON: {first_line(error)}") from None


_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


def assignment(text: str) -> tuple[str, Any]:
    """The name and the value of --set KEY=VALUE. Raises UsageError."""
    key, mark, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not mark or not key:
        raise UsageError(f"cannot read --set {text!r}: write --set key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        if (json_word := _OF_PYTHON.get(value.strip())) is not None:
            raise UsageError(
                f"the value of --set {text!r} is Python's, and JSON is read here; write "
                f"--set {key}={json_word}"
            ) from None
        raise UsageError(
            f"the value of --set {text!r} is not JSON; write a number, true, a list, or a text in "
            f"double quotes: --set '{key}=\"…\"'"
        ) from None


def _help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        print(context.get_help())
        raise typer.Exit


#: Instead of typer's own, whose value typer 0.29 checks with pydantic: 60 ms on every command.
HelpOption = Annotated[
    bool,
    typer.Option("--help", help="Show this message and exit.", callback=_help, is_eager=True),
]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of a command's dataclass parameters as parameters of the command.

    Adds --model where the model is an argument, and --help, so the command is to be registered with
    `add_help_option=False`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name not in groups
    ]
    flags = [flag for group in groups.values() for flag in _flags(group)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags.append(inspect.Parameter("usage", keyword, default=False, annotation=HelpOption))
    default: str | None = None
    if by_place := hints.get("model") in (ModelArgument, OptionalModel):
        at = next(i for i, p in enumerate(own) if p.name == "model")
        default = own[at].default
        own[at] = own[at].replace(default=None, annotation=OptionalModel)
        flags.insert(0, inspect.Parameter("named", keyword, default=None, annotation=_ModelNamed))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        del values["usage"]
        if by_place:
            values["model"] = _one_model(values["model"], values.pop("named"), default)
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    del flat.__wrapped__  # typer reads the signature of what it wraps
    flat.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    return flat


def _one_model(said: str | None, named: str | None, default: str | None) -> str | None:
    if said is not None and named not in (None, said):
        raise UsageError(f"{said} and --model {named} name two models; give one")
    return next((name for name in (said, named) if name is not None), default)


def _flags(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(group)
    ]
