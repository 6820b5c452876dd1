"""A right quantizer of a stranger, of which mutants grow: 4 bits, with classes of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from jackfield.contracts import Quantizer, QuantizerCapabilities
from jackfield.contracts.checkpoint import Form, one_of, paths, unlike
from jackfield.contracts.quantizing import cut_groups, mixed_bytes, own_part

METHOD = "nibbles"
GROUP = 16


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes `[out, in / 2]` of two numbers each, and bfloat16 scales `[out, in / 16]`."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).bfloat16().float()
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    numbers = (groups / safe[..., None]).round().clamp(-7, 7).to(torch.int16) + 8
    flat = numbers.flatten(1)
    packed = flat[:, ::2] + 16 * flat[:, 1::2]
    return packed.to(torch.uint8), scales.bfloat16()


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[out, in]`."""
    numbers = torch.stack([packed % 16, packed // 16], -1).flatten(1)
    groups = (numbers.float() - 8).unflatten(1, (-1, GROUP))
    return (groups * scales[..., None].float()).flatten(1)


class NibbleLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("packed", torch.zeros(out_features, in_features // 2).byte())
        self.register_buffer("scales", torch.zeros(out_features, in_features // GROUP).bfloat16())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        return dequantize(self.packed, self.scales)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)


class NibbleConfig(QuantizationConfigMixin):
    def __init__(self, group_size: int = GROUP, **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.group_size = group_size


def matrix(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % GROUP == 0


class NibbleHfQuantizer(HfQuantizer):
    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.kept = self.get_modules_to_not_convert(model, None)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        path, _, own = param_name.rpartition(".")
        kept = any(path == k or path.startswith(f"{k}.") for k in self.kept)
        return own == "weight" and not kept and matrix(model.get_submodule(path))

    def get_quantize_ops(self) -> ConversionOps:
        return Store(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        return [WeightConverter([r"\.packed$", r"\.scales$"], ".weight", [Read(self)])]

    def put(self, model: Any, name: str, parts: Any, missing: Any) -> dict[str, Any]:
        path = name.rpartition(".")[0]
        linear = model.get_submodule(path)
        bias = None if linear.bias is None else own_part(linear.bias)
        made = NibbleLinear(*own_part(linear.weight).shape[::-1], bias)
        made.packed, made.scales = parts
        made._is_hf_initialized = True
        model.set_submodule(path, made)
        missing.discard(name)
        return {}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        read = getattr(model, "_weight_conversions", None) or []
        for conversion in [c for c in read if reads_ours(c)]:
            read.remove(conversion)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def reads_ours(conversion: Any) -> bool:
    return any(isinstance(o, Read) for o in getattr(conversion, "operations", ()))


class Store(ConversionOps):
    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict: Any, *_: Any, **kwargs: Any) -> dict[str, Any]:
        whole = {}
        for name, weight in input_dict.items():
            weight = weight[0] if isinstance(weight, list) else weight
            if self.quantizer.param_needs_quantization(kwargs["model"], name):
                missing = kwargs["missing_keys"]
                self.quantizer.put(kwargs["model"], name, quantize(weight), missing)
            else:
                whole[name] = weight
        return whole


class Read(ConversionOps):
    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Any, *_: Any, **kwargs: Any) -> dict[str, Any]:
        parts = [p[0] if isinstance(p, list) else p for p in input_dict.values()]
        parts.sort(key=lambda part: part.dtype is not torch.uint8)
        parts[1] = parts[1].bfloat16()  # transformers reads all numbers in the dtype of the model
        missing = kwargs["missing_keys"]
        return self.quantizer.put(kwargs["model"], kwargs["full_layer_name"], parts, missing)

    def __deepcopy__(self, memo: Any) -> Read:
        return self


class Nibbles(Quantizer):
    """Numbers from -7 to 7 with a scale for each 16."""

    name = "nibbles"
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"float32", "bfloat16"}),
        devices=frozenset({"cpu"}),
        relative_error=0.1,
        compiles=True,
        tensor_parallel=True,
    )
    fields: ClassVar[Any] = {"group_size": one_of(GROUP, needed=True)}

    def register(self) -> None:
        AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = NibbleConfig
        AUTO_QUANTIZER_MAPPING[METHOD] = NibbleHfQuantizer

    def reads(self, stored: Any) -> bool:
        if stored.get("quant_method") != METHOD:
            return False
        self.register()
        return True

    def refuse(self, requirements: Any, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        linear = [w for w in requirements.weights if w.linear and not w.transposed]
        if requirements.weights and not any(has_groups(w) for w in linear):
            reasons.append("groups of 16 divide the inputs of no nn.Linear of this model")
        return reasons + cut_groups(requirements, GROUP)

    def weight_bytes(self, requirements: Any, options: Any) -> int:
        def size(weight: Any) -> int | None:
            if weight.linear is None or weight.transposed or not has_groups(weight):
                return None
            return weight.numbers // 2 + weight.numbers // GROUP * 2

        return mixed_bytes(requirements, size)

    def bind(self, context: Any) -> Any:
        from dataclasses import replace

        bound = super().bind(context)
        needs = context.requirements
        if needs is None or needs.stored is None:
            return bound
        return replace(bound, misfits=lambda tensors: misfits(needs, tensors))

    def make_config(self, context: Any) -> NibbleConfig:
        self.register()
        return NibbleConfig()

    def converted(self, module: nn.Module) -> bool:
        return isinstance(module, NibbleLinear)


def has_groups(weight: Any) -> bool:
    return (weight.whole or weight.linear)[1] % GROUP == 0


def misfits(needs: Any, tensors: Any) -> list[str]:
    """Why the files are not of this form."""
    found = paths(tensors, ".packed", ".scales")
    if not found:
        return ["its config says nibbles, and none of its weights is quantized"]
    known = {w.name.removesuffix(".weight"): w.whole or w.linear for w in needs.weights}
    for path in found:
        rows, columns = known[path]
        forms = {
            f"{path}.packed": Form(("U8",), (rows, columns // 2)),
            f"{path}.scales": Form(("BF16",), (rows, columns // GROUP)),
        }
        if reasons := unlike(tensors, forms):
            return reasons
    return []
