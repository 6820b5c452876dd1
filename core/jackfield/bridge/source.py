"""What a caller means by `model`: a live model, a config, a folder or file, a hub id, "demo"."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from jackfield.bridge.config_values import check_values
from jackfield.bridge.gguf import GgufModel, is_gguf, open_gguf
from jackfield.errors import CheckpointError, JackfieldError, UsageError, first_line, quoted, shown
from jackfield.foreign import error_line, read_json
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

#: The models inside the package.
PACKAGED = ("demo", "demo-draft")

#: The files of a folder that somebody may open and then wait for, if they are pipes.
_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})


@dataclass(frozen=True)
class ModelSource:
    """A model that was found; its weights are not read. `location` is a folder, a hub id, or the
    name of a GGUF file, whose header is `gguf`.
    """

    config: PreTrainedConfig
    location: str | None = None
    revision: str | None = None
    live: PreTrainedModel | None = None
    #: the PEFT configs of a live model's adapters, by name
    adapters: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufModel | None = None

    @property
    def origin(self) -> str:
        """Where its config comes from, as messages call it."""
        if self.location is None:
            return "the config"
        return f"the {'config.json' if self.gguf is None else 'header'} of {self.location}"

    @property
    def folder(self) -> Path | None:
        """The folder on this machine, None for a hub id, a live model or a config."""
        path = Path(self.location) if self.location else None
        return path if path and path.is_dir() else None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)


def find(
    model: str | Path | PreTrainedModel | PreTrainedConfig, revision: str | None
) -> ModelSource:
    """Find `model` and read its config. Raises CheckpointError, UsageError for a `revision` of what
    has none.
    """
    if revision is not None:
        _check_revision(model, revision)
    if isinstance(model, torch.nn.Module) and hasattr(model, "_orig_mod"):
        raise CheckpointError(
            "the model is wrapped by torch.compile; give the model itself, and name a compiler in "
            "load: compile='inductor'"
        )
    if isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model"):
        return _live(model)
    if isinstance(model, PreTrainedConfig):
        check_values(model.to_dict(), f"the {type(model).__name__}")
        return ModelSource(model)
    if not isinstance(model, str | Path):
        raise CheckpointError(
            f"cannot load {type(model).__name__}: give a hub id, a folder, a transformers model or "
            "'demo'"
        )
    location = str(model)
    if not location:
        raise CheckpointError("the model's name is empty; give a hub id, a folder or 'demo'")
    if is_gguf(location):
        with quiet():
            gguf = open_gguf(location, revision)
        return ModelSource(gguf.config, location, revision, gguf=gguf)
    location = packaged(location)
    config = _read_config(location, revision)
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{location} is an encoder-decoder model; jackfield runs decoders only"
        )
    return ModelSource(config, location, revision)


def packaged(location: str) -> str:
    """The folder of a model inside the package; a folder of that name is "./demo"."""
    if location not in PACKAGED:
        return location
    from jackfield.demo import DRAFT_PATH, MODEL_PATH

    return str(MODEL_PATH if location == "demo" else DRAFT_PATH)


def _check_revision(model: Any, revision: Any) -> None:
    if not isinstance(revision, str) or not revision:
        raise UsageError(f"revision must be a branch, a tag or a commit, not {revision!r}")
    named = isinstance(model, str | Path) and str(model)
    file = bool(named and is_gguf(named))
    if file and not Path(str(named)).exists():
        return
    if not named or model in PACKAGED or file or is_folder(Path(model), str(model)):
        raise UsageError(
            f"revision={quoted(revision)}: only models of the hub have revisions, a folder, a "
            "file, a live model, a config and demo have none; drop it"
        )


def _live(model: Any) -> ModelSource:
    """A live model, or the one inside PEFT's wrapper, which its adapters have changed."""
    adapters = getattr(model, "peft_config", None) or {}
    if not isinstance(model, PreTrainedModel):
        for config in adapters.values():
            if config.is_prompt_learning or config.is_adaption_prompt:
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise CheckpointError(
                    f"a live {type(model).__name__} with {kind}, which adds to the prompt and not "
                    "to the weights, is not run here; give one with LoRA"
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{type(model).__name__} is not a transformers model")
    check_values(model.config.to_dict(), f"the config of the live {type(model).__name__}")
    return ModelSource(model.config, live=model, adapters=dict(adapters))


def _read_config(location: str, revision: str | None) -> PreTrainedConfig:
    folder = Path(location)
    written = _check_folder(folder, location)
    where = f"the config.json of {location}"
    check_values(written, where)  # before transformers makes a list of so many layers
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            location, revision=revision, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(_explain(location, error)) from error
    check_values(config.to_dict(), where)
    _ignore_selectors(config, written, location)
    return config


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
        raise CheckpointError(
            f"{location} has no config.json, so it is not a model folder; give the folder that "
            "save_pretrained wrote"
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


@contextlib.contextmanager
def blamed(source: ModelSource) -> Iterator[None]:
    """Tell what a config makes of a model's code as a CheckpointError that says whose config it is.

    Of a live model nothing is told: its code ran before.
    """
    try:
        yield
    except CheckpointError as error:
        if source.location is None or source.location in str(error):
            raise
        raise CheckpointError(f"{source.location}: {error}") from error
    except JackfieldError:
        raise
    except Exception as error:
        if source.live is not None:
            raise
        raise CheckpointError(
            f"{source.origin} gives no model that runs: {error_line(error)}"
        ) from error


def is_folder(folder: Path, location: str) -> bool:
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
        raise CheckpointError(f"{shown(location)} is not a folder; give a model folder or a hub id")
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


#: transformers changes its own classes, and we its loggers, while something is loaded: of two
#: threads that do so at once, the one that ends last would leave the other's changes for ever.
LOADING = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing what it notes while it builds things of no interest.

    One thread at a time.
    """
    with LOADING:
        before = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(before)
            if bars:
                transformers_logging.enable_progress_bar()


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
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            yield from config_tree(part)
