"""``bnb-8bit``: LLM.int8() of bitsandbytes, weights and activations in 8 bits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Quantization, Quantizer, Requirements, Weight
from jackfield.contracts.checkpoint import Tensors
from jackfield_plugins.quantizer.bitsandbytes import BitsAndBytes
from jackfield_plugins.quantizer.bnb_files import eight_bits

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel


@dataclass(frozen=True)
class Options:
    """`threshold`: columns with an activation above it are computed in 16 bits; 0 for none.

    A column is one of the whole step, so with a threshold a request's neighbours decide which
    of its numbers are rounded.
    """

    threshold: float = 6.0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < float("inf"):
            raise ValueError(f"threshold must be 0 or more, not {self.threshold}")


class Bnb8bit(BitsAndBytes):
    """Rows of weights and of activations scaled by their largest number (Dettmers et al. 2022,
    arXiv:2208.07339). Activations pass through float16.
    """

    name = "bnb-8bit"
    options = Options
    chosen_by = "load_in_8bit"
    layer = "Linear8bitLt"
    capabilities = replace(BitsAndBytes.capabilities, relative_error=0.012)

    def bind(self, context: BindContext) -> Quantization:
        bound = super().bind(context)
        # It says so of every layer in every step; here it stands in the documentation.
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_not_of_casts)
        return bound

    def in_files(
        self, needs: Requirements, stored: Mapping[str, Any], tensors: Tensors
    ) -> list[str]:
        return eight_bits(needs, stored, tensors)

    def finish(self, model: PreTrainedModel) -> None:
        """Give layers their inputs row by row, whatever their shape.

        On a CPU, bitsandbytes looks for the largest number of each row along the second dimension,
        which is another one where there are four, as in DeepSeek's attention.
        """
        for module in model.modules():
            if self.converted(module):
                module.forward = functools.partial(_by_rows, module.forward)

    def runs_on(self, module: nn.Module) -> str | None:
        """What an outlier is has to be known on the host before a layer can go on."""
        weight: Any = module.weight
        state: Any = module.state
        if weight.device.type != "cuda" or not state.threshold:
            return None
        return (
            f"each waits for the GPU to find outliers above {state.threshold:g} "
            "('bnb-8bit?threshold=0' looks for none)"
        )

    def make_config(self, context: BindContext) -> BitsAndBytesConfig:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=float(context.options.threshold)
        )

    def convert(
        self, config: Mapping[str, Any] | None, options: Any
    ) -> Callable[[Weight], int | None]:
        """One byte a number, and a float32 scale a row."""
        if config is not None and config.get("llm_int8_has_fp16_weight"):
            return lambda weight: None  # quantized anew in every step, and kept as they are
        return lambda weight: weight.numbers + 4 * (weight.linear or (0,))[0]


def _by_rows(forward: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    found = forward(states.flatten(0, -2))
    return found.view(*states.shape[:-1], -1)


def _not_of_casts(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Bnb8bit()]
