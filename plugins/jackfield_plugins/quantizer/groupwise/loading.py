"""How transformers' `from_pretrained` quantizes, or reads, a model of these layers.

A linear layer is replaced when its weight comes from disk, so only one is held whole at a time, and
what was read of the file is given back at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationConfigMixin

from jackfield.contracts.quantizing import own_part
from jackfield.errors import PlanError
from jackfield_plugins.quantizer.groupwise.choosing import product
from jackfield_plugins.quantizer.groupwise.files import forget_files
from jackfield_plugins.quantizer.groupwise.linear import WEIGHTS, GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.quantize import (
    DTYPES,
    Product,
    Quantized,
    cannot_quantize,
    quantize,
)
from jackfield_plugins.quantizer.on_cpu import CpuHfQuantizer, put
from jackfield_plugins.quantizer.on_cpu import register as teach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The bits of each method that was registered.
_BITS: dict[str, int] = {}


class GroupwiseConfig(QuantizationConfigMixin):
    """What a checkpoint says of itself: `quant_method` tells the bits, `group_size` inputs share a
    scale, `head` is how many bits the output head has (None: it is whole).

    `kernel` is how it is computed and not part of a checkpoint, but that activations are rounded to
    8 bits (`activations="int8"`, the kernel `int8`). `modules_to_not_convert` are names
    or beginnings of names; None: the output head and what is tied to it.
    """

    def __init__(
        self,
        quant_method: str,
        group_size: int = 32,
        head: int | None = None,
        kernel: str = "auto",
        modules_to_not_convert: list[str] | None = None,
        activations: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method: Any = quant_method
        self.group_size = group_size
        self.head = head
        self.kernel = "int8" if activations == "int8" else kernel
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        said = super().to_dict()
        return said | {"activations": "int8"} if said.pop("kernel") == "int8" else said


class GroupwiseHfQuantizer(CpuHfQuantizer):
    """transformers' side of the quantizer."""

    quantization_config: GroupwiseConfig

    def __init__(self, quantization_config: GroupwiseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.called = str(quantization_config.quant_method)
        self.bits = _BITS[self.called]
        self.dtypes = DTYPES[self.bits]
        self._kept: list[str] = []
        self.product: Product | None = None

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        self.product = product(config.kernel)
        self._kept = self.get_modules_to_not_convert(model, config.modules_to_not_convert)

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        path, _, own = param_name.rpartition(".")
        module = model.get_submodule(path)
        return (
            own == "weight"
            and (type(module) is nn.Linear or isinstance(module, Conv1D))
            and not any(path == k or path.startswith(f"{k}.") for k in self._kept)
            and not cannot_quantize(_matrix(module), self.quantization_config.group_size)
        )

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        return [WeightConverter([rf"\.{name}$" for name in WEIGHTS], ".weight", [_Read(self)])]

    def replace(
        self, model: PreTrainedModel, name: str, quantized: Quantized, missing: set[str] | None
    ) -> dict[str, Any]:
        """Put a layer with these weights where the linear layer of the parameter `name` is."""
        assert self.product is not None
        path = name.rpartition(".")[0]
        linear: Any = model.get_submodule(path)
        out_features, in_features = own_part(_matrix(linear)).shape
        config = self.quantization_config
        made = GroupwiseLinear(
            in_features,
            out_features,
            linear.bias is not None,
            self.product,
            group_size=config.group_size,
            bits=(config.head if linear is model.get_output_embeddings() else None) or self.bits,
            dtype=linear.weight.dtype,
        )
        made.set_weight(quantized, None if linear.bias is None else own_part(linear.bias))
        put(model, path, made)
        if missing is not None:
            missing.discard(name)
        return {}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.quantization_config.head and not self.pre_quantized:
            store_head(model)
        # What was read in canonical form is saved so by the layers, and `save_pretrained` would
        # undo all that reading did.
        read: Any = getattr(model, "_weight_conversions", None) or []
        ours = [
            c for c in read if any(isinstance(op, _Read) for op in getattr(c, "operations", ()))
        ]
        for conversion in ours:
            read.remove(conversion)

    def is_serializable(self) -> bool:
        return True


def _matrix(module: Any) -> torch.Tensor:
    """Its weight, `[out_features, in_features]`."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


class _Quantize(ConversionOps):
    """Weights as the model has them: one, or several that a checkpoint keeps as one."""

    def __init__(self, quantizer: GroupwiseHfQuantizer) -> None:
        self.hf_quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        model: PreTrainedModel = kwargs["model"]
        bits, size = self.hf_quantizer.bits, self.hf_quantizer.quantization_config.group_size
        whole = {}
        while input_dict:  # taken out one by one, so that none is held longer than it has to be
            name, weight = input_dict.popitem()
            weight = weight[0] if isinstance(weight, list) else weight
            if not self.hf_quantizer.param_needs_quantization(model, name):
                whole[name] = weight
                continue
            if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D):
                weight = weight.T
            made = quantize(weight, bits=bits, group_size=size)
            del weight
            forget_files()
            self.hf_quantizer.replace(model, name, made, kwargs.get("missing_keys"))
        return whole


class _Read(ConversionOps):
    """A weight that was quantized before, in canonical form."""

    def __init__(self, quantizer: GroupwiseHfQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        parts = [part[0] if isinstance(part, list) else part for part in input_dict.values()]
        made = Quantized(*sorted(parts, key=lambda part: part.dtype is not torch.uint8))
        name, missing = kwargs["full_layer_name"], kwargs.get("missing_keys")
        return self.hf_quantizer.replace(kwargs["model"], name, made, missing)

    def __deepcopy__(self, memo: Any) -> _Read:
        """transformers copies a conversion for each layer; the quantizer is one for all."""
        return self


def store_head(model: PreTrainedModel) -> None:
    """Store the output head of a model that was read in groups too, in a copy where it is tied."""
    config: GroupwiseConfig = model.config.quantization_config
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or cannot_quantize(head.weight, config.group_size):
        raise PlanError(
            f"{config.quant_method} cannot store the output head of {type(model).__name__} in "
            f"groups of {config.group_size}; leave 'head' out"
        )
    made = GroupwiseLinear.from_linear(
        head,
        product(config.kernel),
        group_size=config.group_size,
        bits=config.head or _BITS[config.quant_method],
    )
    model.set_output_embeddings(made)
    model.config.tie_word_embeddings = False
    forget_files()


def compute_on(model: PreTrainedModel, *, kernel: str) -> None:
    """Have the layers of a model that was read computed by `kernel`, whatever the file says."""
    wanted = product(kernel)
    for module in model.modules():
        if isinstance(module, GroupwiseLinear) and module.product.name != wanted.name:
            stored = module.quantized()
            module.product = wanted
            module.set_weight(stored)


def register(method: str, bits: int) -> None:
    """Teach transformers the method. A second call changes nothing."""
    _BITS[method] = bits
    teach(method, GroupwiseConfig, GroupwiseHfQuantizer)
