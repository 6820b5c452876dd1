"""The files of an adapter of PEFT: found, and judged before any of their values is used."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import math
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.bridge.config_files import is_folder
from jackfield.bridge.footprint import head_is_tied
from jackfield.bridge.quiet import quiet
from jackfield.errors import CheckpointError, first_line, quoted, shown
from jackfield.foreign import read_json
from jackfield.spelling import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

#: The types of PEFT that are tested here; each is a change of single modules.
TYPES = ("LORA", "IA3", "LOHA", "LOKR")

#: Keys of an adapter_config.json that do more than add weights to modules -> what they do.
ADDS_MORE = {
    "alora_invocation_tokens": "switches it on in the middle of a prompt, which no loop here does",
    "arrow_config": "routes between several adapters",
    "kasa_config": "cuts the model's own weights down",
    "layer_replication": "gives the model other layers",
    "megatron_config": "is for Megatron's layers",
}
#: Ways to initialize that change the base weights, too, when the adapter is loaded.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep the console clean: PEFT brings in every quantizer's library, which all tell things."""
    with quiet(), warnings.catch_warnings():  # which lets one thread in at a time
        disabled = logging.root.manager.disable
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.ERROR))
        try:
            yield
        finally:
            logging.disable(disabled)


def folder_of(location: str) -> Path:
    path = Path(location)
    if is_folder(path, location, "an adapter's folder"):
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                f"{location} has no {CONFIG}, so it is not an adapter; give the folder that PEFT's "
                "save_pretrained wrote"
            )
        return path
    from huggingface_hub import snapshot_download

    name, _, revision = location.partition("@")
    try:
        with quiet():
            return Path(
                snapshot_download(name, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS])
            )
    except Exception as error:
        raise CheckpointError(
            f"cannot find the adapter {location!r}: it is neither a folder here nor an adapter "
            f"that the hub gives: {first_line(error)}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """What is in the config, as far as it can be judged without PEFT."""
    file = folder / CONFIG
    config = read_json(file)
    if "peft_type" not in config:
        raise CheckpointError(
            f"{file} is not a JSON object that names a peft_type; fetch the adapter again"
        )
    kind = config["peft_type"]
    if kind not in TYPES:
        raise CheckpointError(
            f"{file}: peft_type {shown(kind)} does not go on single modules of a decoder, or is "
            f"untested here; give one of {', '.join(TYPES)}"
            f"{nearest(shown(kind), TYPES)}"
        )
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{file}: task_type is {shown(task)}, not CAUSAL_LM")
    for key, does in ADDS_MORE.items():
        if config.get(key):
            raise CheckpointError(f"{file}: {key} {does}; give an adapter without it")
    start = str(config.get("init_lora_weights"))
    if start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights={quoted(start)} changes the model's own weights when it "
            "is loaded; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    _check_file(folder)
    return config


def _check_file(folder: Path) -> None:
    if (folder / WEIGHTS).is_file():
        return
    if (folder / PICKLE).is_file():
        raise CheckpointError(
            f"the adapter in {folder} is a pickle ({PICKLE}), which can run code when read; save "
            "it as safetensors in a place you trust"
        )
    raise CheckpointError(f"there are no weights in {folder}: expected {WEIGHTS}")


def made_for(folder: Path) -> str:
    made = read_json(folder / CONFIG).get("base_model_name_or_path")
    return f" (made for {shown(made)})" if made else ""


def check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Hold each field to the type that PEFT declares for it, and refuse those that it lacks.

    PEFT drops keys that it does not know, with a warning, and takes any value for any other.
    """
    with hushed():
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
        from peft.utils import PeftType

        kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(config["peft_type"])]
        hints = typing.get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind)}
    file = folder / CONFIG
    if unknown := sorted(key for key in config if key not in known):
        raise CheckpointError(
            f"{file} has {shown(', '.join(unknown[:3]))}, which the installed PEFT does not know; "
            "pip install -U peft"
        )
    for name, value in config.items():
        if not _fits(value, hints.get(name, Any)):
            raise CheckpointError(
                f"{file}: {name} is {quoted(value)}, and has to be "
                f"{_words(hints[name])}; fetch the adapter again"
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON can be what a hint says."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (list, tuple, set):
        return isinstance(value, list) and all(_fits(v, parts[0]) for v in value if parts)
    if origin is dict:  # its keys are texts in JSON
        return isinstance(value, dict) and all(_fits(v, parts[1]) for v in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint in (bool, int, str, list, dict, type(None)):
        return type(value) is hint
    if hint in (set, tuple):
        return isinstance(value, list)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return isinstance(value, str)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict)
    return True


def _words(hint: Any) -> str:
    """A hint as a message has it."""
    if isinstance(hint, type):
        return "null" if hint is type(None) else hint.__name__
    return (
        " or ".join(map(_words, typing.get_args(hint)))
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else str(hint).replace("typing.", "")
    )


def check_tied(folder: Path, config: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Refuse new rows for an embedding that is the output head too: PEFT ties them as it trains,
    and transformers finds no place for them.
    """
    if config.get("trainable_token_indices") is not None and head_is_tied(model):
        raise CheckpointError(
            f"{folder}: trainable_token_indices changes rows of an embedding, which in "
            f"{type(model).__name__} is the output head too; merge the adapter with PEFT, and give "
            "the merged model"
        )
