"""How transformers' `from_pretrained` puts a file's blocks into a model.

Matrices come one by one, as the file has them, and are laid out for the kernel at once, so little
more than the model itself is ever held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationConfigMixin

from jackfield.contracts.quantizing import GGUF_BLOCKS
from jackfield.errors import CheckpointError, ExecutionError
from jackfield_plugins.quantizer.gguf.layers import DTYPES, GgufEmbedding, GgufLinear
from jackfield_plugins.quantizer.gguf.native import BLOCKS, Matrix
from jackfield_plugins.quantizer.on_cpu import CpuHfQuantizer, put
from jackfield_plugins.quantizer.on_cpu import register as teach

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GgufBlocksConfig(QuantizationConfigMixin):
    """`tensors`: of each matrix that stays in blocks its type and shape, out × in."""

    def __init__(self, tensors: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.quant_method: Any = GGUF_BLOCKS
        self.tensors = tensors or {}


class GgufBlocksHfQuantizer(CpuHfQuantizer):
    """transformers' side of the quantizer."""

    called = "gguf"
    dtypes = DTYPES
    quantization_config: GgufBlocksConfig

    def __init__(self, quantization_config: GgufBlocksConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Or transformers would take the state dict for one that a quantizer saved.
        self.pre_quantized = False
        self._dtype = torch.bfloat16
        self.refused: dict[str, str] = {}  # transformers tells of errors without their names

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = super().update_dtype(dtype)
        return self._dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        tensors = self.quantization_config.tensors
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for target, source in tied.items():  # by name or pattern; a head is by name
            if source in tensors:
                tensors = {**tensors, target: tensors[source]}
        for name, (kind, *shape) in tensors.items():
            if kind in BLOCKS:
                self._replace(model, name.removesuffix(".weight"), Matrix(kind, *shape))

    def _replace(self, model: PreTrainedModel, path: str, matrix: Matrix) -> None:
        old: Any = model.get_submodule(path)
        if isinstance(old, nn.Linear | Conv1D):
            made: nn.Module = GgufLinear(matrix, old.bias)
        else:
            made = GgufEmbedding(matrix, self._dtype, getattr(old, "scalar_embed_scale", None))
        put(model, path, made)

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        path, _, own = param_name.rpartition(".")
        return own == "weight" and isinstance(model.get_submodule(path), GgufLinear | GgufEmbedding)

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def is_serializable(self) -> bool:
        return False


class _Pack(ConversionOps):
    """Hands a file's blocks to their layer."""

    def __init__(self, quantizer: GgufBlocksHfQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        for name, found in input_dict.items():
            layer: Any = kwargs["model"].get_submodule(name.rpartition(".")[0])
            try:
                layer.set_blocks(found[0] if isinstance(found, list) else found)
            except ExecutionError as error:
                self.hf_quantizer.refused[name] = str(error)
            kwargs["missing_keys"].discard(name)
        return {}


def finish(model: PreTrainedModel, *, int8: bool) -> None:
    """Raise CheckpointError where blocks of a model that was read were refused; its linear layers
    round activations where `int8` says so.
    """
    quantizer: GgufBlocksHfQuantizer = model.hf_quantizer  # type: ignore[assignment]
    for name, why in quantizer.refused.items():
        raise CheckpointError(f"the file has {why} in {name}; fetch it again")
    for module in model.modules():
        if isinstance(module, GgufLinear):
            module.int8 = int8


def register() -> None:
    """Teach transformers the method. A second call changes nothing."""
    teach(GGUF_BLOCKS, GgufBlocksConfig, GgufBlocksHfQuantizer)
