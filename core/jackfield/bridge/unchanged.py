"""A live model is its owner's, who may change it while an engine runs it as it was planned."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensor

from jackfield.bridge.config_files import config_tree
from jackfield.errors import ExecutionError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Fields that no step reads; `save_pretrained` writes the dtype, which weights are asked about.
_UNREAD = re.compile(
    r"^_|_token_ids?$|^(use_cache|architectures|dtype|name_or_path|transformers_version)$"
)


class Unchanged:
    """What a model was when its engine was made: its config, the dtype and place of its weights.

    Weights may be changed in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._embedding: Any = model.get_input_embeddings()
        weight = self._embedding.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._configs = [(part, copy.deepcopy(_read(part))) for part in config_tree(model.config)]

    def check_weights(self) -> None:
        """Raise ExecutionError where the model was cast or moved; cheap, for every step."""
        weight = self._embedding.weight
        if weight.dtype is self._dtype and weight.device == self._device:
            return
        if isinstance(weight, FakeTensor):  # torch.export is reading the model, in another thread
            return
        now, was, verb = weight.dtype, f"as {self._dtype}", "cast to"
        if weight.device != self._device:
            now, was, verb = weight.device, f"on {self._device}", "moved to"
        said = f"the model was {verb} {now} while an engine runs it {was}".replace("torch.", "")
        raise ExecutionError(f"{said}; close the engine and load it again")

    def check_config(self) -> None:
        """Raise ExecutionError where the config says something else by now."""
        for config, before in self._configs:
            now = _read(config)
            if now == before:
                continue
            for name in sorted(now.keys() | before.keys()):
                is_so, was = now.get(name), before.get(name)
                if is_so != was:
                    raise ExecutionError(
                        f"the model's config was changed while an engine runs it: {name} "
                        f"{quoted(was)} -> {quoted(is_so)}; close the engine and "
                        "load it again"
                    )


def _read(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config says itself, without the configs in it."""
    parts = type(config).sub_configs
    return {n: v for n, v in vars(config).items() if n not in parts and not _UNREAD.search(n)}
