"""What a caller means by `model`: a live model, a config, a folder or file, a hub id, "demo"."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.bridge.config_files import is_folder, read_config
from jackfield.bridge.config_values import check_values
from jackfield.bridge.gguf import GgufModel, is_gguf, open_gguf
from jackfield.bridge.quiet import quiet
from jackfield.errors import CheckpointError, UsageError, quoted

logger = logging.getLogger("jackfield")

#: The models inside the package.
PACKAGED = ("demo", "demo-draft")
#: As Ollama names a model, and llama.cpp a file of a hub's repository.
_TAG = re.compile(
    r"(?:(?:hf\.co/|huggingface\.co/)?(\w[\w.-]*/[\w.-]+)|\w[\w.-]+):(?![\w.-]*\.gguf$)[\w.-]+"
)


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
    if (tag := _TAG.fullmatch(location)) and not os.path.lexists(location):
        where = f"{tag[1] or 'OWNER/REPOSITORY'}/FILE.gguf"
        raise CheckpointError(
            f"{location} has a tag, and there are none here: write the GGUF file itself, {where}, "
            "or a hub id without one"
        )
    if not location:
        raise CheckpointError("the model's name is empty; give a hub id, a folder or 'demo'")
    if is_gguf(location):
        with quiet():
            gguf = open_gguf(location, revision)
        return ModelSource(gguf.config, location, revision, gguf=gguf)
    location = packaged(location)
    return ModelSource(read_config(location, revision), location, revision)


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
