"""What quantizers share whose layers are computed by kernels on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer

from jackfield.errors import ExecutionError
from jackfield_plugins.native.arguments import listed

if TYPE_CHECKING:
    import torch
    from torch import nn


class CpuHfQuantizer(HfQuantizer):
    """transformers' side of such a quantizer, as far as all have it.

    Attributes:
        called: The backend's name.
        dtypes: Of activations.
    """

    called: str
    dtypes: tuple[torch.dtype, ...]

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in self.dtypes:
            raise ValueError(f"{self.called} computes in {listed(self.dtypes)}, not in {dtype}")
        return dtype

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        places = kwargs.get("device_map")
        found = set(places.values()) if isinstance(places, dict) else {places} - {None}
        if stray := {str(place) for place in found} - {"cpu"}:
            raise ValueError(f"{self.called} runs on the CPU, not on {', '.join(sorted(stray))}")

    @property
    def is_trainable(self) -> bool:
        return False


def put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Have `layer` in the place of a model's module, while weights are read."""
    setattr(layer, "_is_hf_initialized", True)  # noqa: B010 - or transformers fills it anew
    model.set_submodule(path, layer)


def register(method: str, config: Any, quantizer: Any) -> None:
    """Teach transformers the method. A second call changes nothing."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, config)
    AUTO_QUANTIZER_MAPPING.setdefault(method, quantizer)


def shape_alone(layer: Any, hidden: torch.Tensor, name: str, wrong: list[str]) -> torch.Tensor:
    """What a linear layer answers a model that is probed on empty tensors: the shape.

    Raises ExecutionError with what is `wrong` and what else it cannot read.
    """
    wrong = list(wrong)
    if hidden.shape[-1] != layer.in_features:
        wrong.append(f"has {layer.in_features} inputs, not {hidden.shape[-1]}")
    if hidden.requires_grad:
        wrong.append("computes no gradients; call it under torch.no_grad()")
    if hidden.device.type not in ("cpu", "meta"):
        wrong.append(f"runs on the CPU, not on {hidden.device}")
    if wrong:
        raise ExecutionError(f"{name}: a layer of {layer.extra_repr()} {'; '.join(wrong)}")
    return hidden.new_empty(*hidden.shape[:-1], layer.out_features)
