"""A model on torch's meta device: modules and shapes, no memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from jackfield.bridge.config_files import config_tree
from jackfield.bridge.encoders import text_class
from jackfield.bridge.quiet import quiet
from jackfield.contracts.compiling import TRACING
from jackfield.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def meta_model(
    config: PreTrainedConfig, cls: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """The model of `config` on the meta device; neither `config` nor memory is touched.

    `cls` is the class to build, by default the one for text generation.
    """
    config = copy.deepcopy(config)
    for part in config_tree(config):
        part._attn_implementation_internal = "eager"
    build = text_class(config).from_config if cls is None else cls
    try:
        with quiet(), TRACING, torch.device("meta"):
            model: PreTrainedModel = build(config)
    except Exception as error:
        raise CheckpointError(
            f"a config of type {config.model_type!r} gives no text-generation model: "
            f"{first_line(error)}"
        ) from error
    return model
