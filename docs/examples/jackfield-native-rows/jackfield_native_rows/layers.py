"""The three classes of a quantizer: what a checkpoint says, how it is read, and the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from jackfield_native_rows import METHOD
from jackfield_native_rows.operator import linear


class RowwiseConfig(QuantizationConfigMixin):
    """Goes into `config.json`. `modules_to_not_convert`; None: the output head."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.modules_to_not_convert = modules_to_not_convert


class RowwiseLinear(nn.Module):
    """`weight` is int8 `[out_features, in_features]`, `scale` float32 `[out_features, 1]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, whole: bool) -> None:
        """`whole`: its weight comes whole, and is quantized then; a file is read as this dtype."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        dtype = None if whole else torch.int8
        integers = torch.empty(out_features, in_features, dtype=dtype)
        self.weight = nn.Parameter(integers, requires_grad=False)
        scale = torch.empty(out_features, 1, dtype=torch.float32)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        return linear(hidden_states, self.weight, self.scale, self.bias)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest integers from -127 to 127 and their scales; off by half a scale at most."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


class RowwiseQuantizer(HfQuantizer):
    """transformers' side. It asks these methods, in this order, while it reads a model."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Put the layers in place, without numbers: also for a checkpoint that was saved so."""
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert
        )
        for path, module in list(model.named_modules()):
            if type(module) is not nn.Linear or any(f"{path}.".startswith(f"{k}.") for k in kept):
                continue
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            with torch.device("meta"):
                new = RowwiseLinear(*sizes, bias, whole=not self.pre_quantized)
            model.set_submodule(path, new)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, own = param_name.rpartition(".")
        here = isinstance(model.get_submodule(path), RowwiseLinear)
        return here and own == "weight" and not self.pre_quantized

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class Quantize(ConversionOps):
    """Called with weights as they come from the file: one, or several that are kept as one."""

    def __init__(self, hf_quantizer: RowwiseQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        made = {}
        for name, given in input_dict.items():
            weight = given[0] if isinstance(given, list) else given
            if self.hf_quantizer.param_needs_quantization(kwargs["model"], name):
                scale = f"{name.removesuffix('weight')}scale"
                made[name], made[scale] = quantize(weight)
            else:
                made[name] = weight
        return made


def register() -> None:
    """Teach transformers the method. A second call changes nothing."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, RowwiseConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, RowwiseQuantizer)
