"""A model that is a GGUF file, or the parts of one: its config, its weights, its tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jackfield.bridge.config_values import check_values
from jackfield.bridge.gguf_config import config_of, tokenizer_of_file
from jackfield.bridge.gguf_header import MAGIC, GgufHeader
from jackfield.bridge.gguf_names import missing, weights_of_file
from jackfield.bridge.gguf_on_the_hub import look_first
from jackfield.bridge.gguf_parts import header_of, parts_of
from jackfield.bridge.gguf_weights import GgufWeight, JoinedWeight
from jackfield.contracts.checkpoint import StoredTensor
from jackfield.contracts.quantizing import GGUF_BLOCKS
from jackfield.errors import CheckpointError, quoted, shown
from jackfield.foreign import named

logger = logging.getLogger("jackfield")
_ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class GgufModel:
    """A file whose header and tensors fit a model. `config` says how weights are stored."""

    header: GgufHeader
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    weights: Mapping[str, GgufWeight | JoinedWeight]

    def compare(self, tokenizer: Any) -> None:
        """Warn where `tokenizer`, which a caller gave, has other tokens than the file."""
        key = "tokenizer.ggml.tokens"
        if key not in self.header.values or not hasattr(tokenizer, "get_vocab"):
            return
        listed, known = self.header.array(key) or [], tokenizer.get_vocab()
        same = sum(known.get(token) == at for at, token in enumerate(listed))
        if 2 * same < len(listed):
            logger.warning(
                "the tokenizer that was given has %d of the %d tokens of %s in their places",
                same, len(listed), self.header.path,
            )  # fmt: skip

    @cached_property
    def tokenizer(self) -> Any | None:
        return tokenizer_of_file(self.header, self.config)

    def tensors(self) -> dict[str, StoredTensor]:
        """Each weight that is one tensor of the file, by the model's name of it."""
        return {
            name: StoredTensor(weight.tensor.type, weight.tensor.shape, weight.tensor.path)
            for name, weight in self.weights.items()
            if isinstance(weight, GgufWeight)
        }

    def first_rows(self, name: str, count: int) -> torch.Tensor | None:
        """The first rows of a matrix `[out, in]`, float32; None where the file has none so."""
        weight = self.weights.get(name)
        if not isinstance(weight, GgufWeight) or weight.change is not None:
            return None
        return weight.first_rows(count)

    def whole(self, name: str) -> torch.Tensor:
        """A weight of one tensor as the model has it, float32."""
        weight = self.weights[name]
        assert isinstance(weight, GgufWeight)
        return weight.to(dtype=torch.float32)

    def whole_config(self) -> PreTrainedConfig:
        """The config without what it says of blocks, which is for quantizers of ours alone."""
        own = type(self.config).from_dict(self.config.to_dict())
        if hasattr(own, "quantization_config"):
            del own.quantization_config
        return own


def is_gguf(location: str) -> bool:
    """Whether a caller means a GGUF file: one here or of the hub by its name, or one that is here
    under any name, by its first bytes.
    """
    path = Path(location)
    try:
        if location.lower().endswith(".gguf"):
            return not path.is_dir()
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # whoever reads it as something else says why
        return False


def open_gguf(location: str, revision: str | None) -> GgufModel:
    """The model in a file, with its header read and no weight. Raises CheckpointError.

    What the hub has is looked at before it is fetched.
    """
    names = parts_of(location)
    parts = [_ON_THE_HUB.fullmatch(name) for name in names]
    if not _is_here(location) and (hub := [part for part in parts if part]):
        look_first(hub[0][1], [part[2] for part in hub], revision, _opened)
    return _opened([_file(name, revision) for name in names])


def _opened(paths: Sequence[Path]) -> GgufModel:
    header = header_of(paths)
    config = config_of(header)
    check_values(config.to_dict(), f"the header of {header.path}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        with named(f"the header of {header.path} gives no text-generation model"):
            raise error
    weights = weights_of_file(header, model)
    if lacks := next(missing(weights, model), None):
        raise CheckpointError(f"{header.path} has no tensor for {lacks}; fetch it again")
    expected = model.state_dict()
    blocks = {
        name: [weight.tensor.type, *weight.tensor.shape]
        for name, weight in weights.items()
        if isinstance(weight, GgufWeight) and weight.in_blocks and name in expected
        if _can_keep(model, name)
    }
    if blocks:
        config.quantization_config = {"quant_method": GGUF_BLOCKS, "tensors": blocks}
    return GgufModel(header, config, type(model), weights)


def _can_keep(model: PreTrainedModel, name: str) -> bool:
    """Whether all layers that share a weight are linear ones or embeddings."""
    layers = [model.get_submodule(name.removesuffix(".weight"))] if name.endswith(".weight") else []
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    layers += [model.get_submodule(to.removesuffix(".weight")) for to in tied if tied[to] == name]
    return bool(layers) and all(
        type(layer) in (nn.Linear, Conv1D, nn.Embedding)
        or type(layer).__name__.endswith("ScaledWordEmbedding")
        for layer in layers
    )


def _is_here(location: str) -> bool:
    return Path(location).exists() or location.startswith(("/", "./", "../", "~"))


def _file(location: str, revision: str | None) -> Path:
    path = Path(location)
    if _is_here(location):
        if not path.is_file():
            home = " (~ is not expanded)" * location.startswith("~")
            raise CheckpointError(f"{shown(location)} is not a file{home}; give a GGUF file")
        return path.absolute()
    found = _ON_THE_HUB.fullmatch(location)
    if found is None:
        raise CheckpointError(
            f"there is no file {shown(location)}; give a GGUF file, or one of the hub as "
            "OWNER/REPOSITORY/FILE.gguf"
        )
    from huggingface_hub import hf_hub_download

    with named(f"cannot fetch {quoted(location)}, which is no file here, from the hub"):
        return Path(hf_hub_download(found[1], found[2], revision=revision))
