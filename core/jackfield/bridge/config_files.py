"""The config of a folder or a hub id: read, checked, and freed of what would choose code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from jackfield.bridge.config_values import check_values
from jackfield.bridge.guilty_fields import without_it
from jackfield.bridge.quiet import quiet
from jackfield.errors import CheckpointError, first_line, quoted, shown
from jackfield.foreign import read_json
from jackfield.spelling import nearest

logger = logging.getLogger("jackfield")

#: Keys by which a model's files could choose code. Never honoured (CVE-2026-4372).
SELECTORS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "attn_implementation",
        "experts_implementation",
    }
)

#: The files of a folder that somebody may open and then wait for, if they are pipes.
_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})


def read_config(location: str, revision: str | None) -> PreTrainedConfig:
    """The config of a folder or a hub id. Raises CheckpointError."""
    folder = Path(location)
    written = _check_folder(folder, location)
    where = f"the config.json of {location}"
    check_values(written, where)  # before transformers makes a list of so many layers
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            location, revision=revision, trust_remote_code=False
        )
    except Exception as error:
        guilty = without_it(folder / "config.json", _opened) if written else ""
        kind = written.get("model_type")
        if "model_type" in written and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
            guilty = f" (model_type={quoted(kind)})"
        raise CheckpointError(f"{_explain(location, error)}{guilty}") from error
    check_values(config.to_dict(), where)
    _ignore_selectors(config, written, location)
    return config


def _opened(folder: Path) -> PreTrainedConfig:
    found: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return found


def _check_folder(folder: Path, location: str) -> dict[str, Any]:
    """What is in the config.json of a folder, after making sure that it is one with a model in it,
    and nothing in it that one could wait for. An empty dict for a hub id. Raises CheckpointError.
    """
    if not is_folder(folder, location):
        return {}
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES and not path.is_file():
            raise CheckpointError(f"{path} is not a file, or leads nowhere; fetch it again")
    config = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        what = "an adapter beside a" if config.is_file() else "an adapter and no"
        raise CheckpointError(
            f"{location} is {what} model, and which of them runs would not be said; give the model "
            "in a folder of its own, and adapter=… that of the adapter"
        )
    if not config.is_file():
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
        give = f"its file {str(files[0])!r}" if files else "the folder that save_pretrained wrote"
        raise CheckpointError(
            f"{location} has no config.json, so it is not a model folder; give {give}"
        )
    if (defaults := folder / "generation_config.json").is_file():
        _check_defaults(defaults)
    return read_json(config)


def _check_defaults(file: Path) -> None:
    """transformers would go on without a broken one and not say so, or fail after the weights were
    read, with no name. Raises CheckpointError.
    """
    found = read_json(file)
    if (error := _objection(found)) is None:
        return
    for name, value in found.items():
        if _objection({name: value}) is not None:
            raise CheckpointError(
                f"{file} says {name}={quoted(value)}, which transformers does not take: "
                f"{first_line(error)}; mend it, or delete it"
            )
    raise CheckpointError(f"{file} is not what transformers takes: {first_line(error)}; mend it")


def _objection(fields: dict[str, Any]) -> Exception | None:
    """What transformers raises over such a generation config."""
    with quiet():
        try:
            GenerationConfig.from_dict(dict(fields))
        except Exception as error:  # noqa: BLE001 - of many kinds, as nothing checks types
            return error
    return None


def is_folder(folder: Path, location: str, what: str = "a model folder") -> bool:
    """Whether it is one; False for what may be a hub id. Raises CheckpointError."""
    try:
        if folder.is_dir():
            os.listdir(folder)
            return True
        is_path = os.path.lexists(folder) or location.startswith(("/", "./", "../", "~"))
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{shown(location)} cannot be read ({reason})") from None
    if is_path:
        home = " (~ is not expanded)" * location.startswith("~")
        raise CheckpointError(f"{shown(location)} is not a folder{home}; give {what} or a hub id")
    return False


def _explain(location: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"{location} needs code from its own repository to run, which jackfield never executes"
        )
    if Path(location).is_dir() or "valid JSON" in text:
        return f"cannot read the config.json of {location}: {first_line(error)}"
    return (
        f"cannot find the model {quoted(location)}: it is neither a folder here nor a model that "
        f"the hub gives (no network, a private one, or a misspelling){nearest(location, ['demo'])}"
    )


def _ignore_selectors(config: PreTrainedConfig, written: dict[str, Any], location: str) -> None:
    """Undo what config.json says about implementations: names come from the caller only."""
    for key, value in _selectors(written).items():
        logger.warning(
            "ignored %s=%s in the config.json of %s: data never selects code",
            key,
            quoted(value),
            location,
        )
    for part in config_tree(config):
        part._attn_implementation_internal = None
        part._experts_implementation_internal = None


def _selectors(data: dict[str, Any]) -> dict[str, Any]:
    found = {key: data[key] for key in data if key in SELECTORS and data[key] is not None}
    for value in data.values():
        if isinstance(value, dict):
            found |= _selectors(value)
    return found


def config_tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """`config` and every config nested in it."""
    yield config
    for key in type(config).sub_configs:  # a file may have a field of that name
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            yield from config_tree(part)
