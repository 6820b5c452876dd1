"""``bnb-4bit``: NF4 and FP4 of bitsandbytes, weights in 4 bits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import BindContext, Quantizer, Requirements, Weight
from jackfield.contracts.checkpoint import Tensors
from jackfield_plugins.quantizer.bitsandbytes import BitsAndBytes
from jackfield_plugins.quantizer.bnb_files import four_bits

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

#: numbers that share a scale, and scales that share one where these are quantized too
BLOCK, BLOCK_OF_SCALES = 64, 256

#: of a layer's outputs, measured: 0.093 and 0.124
ERRORS = {"nf4": 0.1, "fp4": 0.135}


@dataclass(frozen=True)
class Options:
    """`type` is the table of 16 values; `double_quantization` stores the scales in 8 bits.

    Products are computed in `compute_dtype`, by default the dtype of the model.
    """

    type: Literal["nf4", "fp4"] = "nf4"
    double_quantization: bool = False
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None


class Bnb4bit(BitsAndBytes):
    """A scale for every 64 numbers of a matrix and a place in a table for each (Dettmers et al.
    2023, arXiv:2305.14314).
    """

    name = "bnb-4bit"
    options = Options
    chosen_by = "load_in_4bit"
    layer = "Linear4bit"

    def relative_error(self, options: Any) -> float | None:
        return ERRORS.get(getattr(options, "type", ""))

    def make_config(self, context: BindContext) -> BitsAndBytesConfig:
        from transformers import BitsAndBytesConfig

        options = context.options
        needs: Requirements | None = context.requirements
        own = None if needs is None else needs.dtype
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=options.type,
            bnb_4bit_use_double_quant=options.double_quantization,
            bnb_4bit_compute_dtype=options.compute_dtype or own,
        )

    def in_files(
        self, needs: Requirements, stored: Mapping[str, Any], tensors: Tensors
    ) -> list[str]:
        return four_bits(needs, stored, tensors)

    def finish(self, model: PreTrainedModel) -> None:
        """Keep bitsandbytes from what it does wrong on a CPU.

        It would repack layers in their first step, where its flag for AVX512-BF16 stands: compute
        in bfloat16 whatever `compute_dtype` says, fail where 32 does not divide the rows, and leave
        scales rounded to bfloat16 in what is saved from then on. And it takes other blocks' scales
        for most of a matrix whose rows are no whole blocks.
        """
        for module in model.modules():
            if self.converted(module):
                layer: Any = module
                layer.support_avx512bf16_for_cpu = False
                if layer.in_features % BLOCK and layer.weight.device.type == "cpu":
                    layer.forward = functools.partial(_by_blocks, layer)

    def convert(
        self, config: Mapping[str, Any] | None, options: Any
    ) -> Callable[[Weight], int | None]:
        """Half a byte a number, the scales, and the tables, which each layer has for itself."""
        nested = (
            options.double_quantization
            if config is None
            else bool(config.get("bnb_4bit_use_double_quant"))
        )

        def size(weight: Weight) -> int:
            scales = math.ceil(weight.numbers / BLOCK)
            table = 16 * 4
            if nested:
                scales += 4 * (math.ceil(scales / BLOCK_OF_SCALES) + 256 + 1)
            else:
                scales *= 4
            return math.ceil(weight.numbers / 2) + scales + table

        return size


def _by_blocks(layer: Any, states: torch.Tensor) -> torch.Tensor:
    """What `Linear4bit` computes, with the matrix unpacked as one row of blocks."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(layer.weight.quant_state)
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    state.dtype = layer.compute_dtype or states.dtype
    weight = dequantize_4bit(layer.weight.data, state).view(shape)
    bias = None if layer.bias is None else layer.bias.to(weight.dtype)
    found = torch.nn.functional.linear(states.to(weight.dtype), weight, bias)
    return found.to(states.dtype)


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Bnb4bit()]
