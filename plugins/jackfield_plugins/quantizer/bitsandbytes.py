"""What `bnb-8bit` and `bnb-4bit` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts import (
    BindContext,
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Weight,
)
from jackfield.contracts.quantizing import in_force, mixed_bytes
from jackfield_plugins.quantizer.libraries import import_bitsandbytes, missing

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class BitsAndBytes(Quantizer):
    """One of bitsandbytes' linear layers in place of torch's, through `BitsAndBytesConfig`."""

    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float16", "float32"}), devices=frozenset({"cpu", "cuda"})
    )
    #: the field of a `BitsAndBytesConfig` that chooses this one of the two
    chosen_by: ClassVar[str]
    layer: ClassVar[str]

    def available(self) -> list[str]:
        return missing("bnb", "bitsandbytes", "accelerate")

    def reads(self, stored: Mapping[str, Any]) -> bool:
        return bool(stored.get(self.chosen_by))

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.stored is not None and isinstance(options, GivenConfig):
            reasons.append("the checkpoint is quantized already; leave the config out")
        return reasons

    def bind(self, context: BindContext) -> Quantization:
        import_bitsandbytes()
        return Quantization(self.config_of(context), finish=self.finish)

    def finish(self, model: PreTrainedModel) -> None:
        del model

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        config = in_force(requirements, options)
        if config is not None and config.get("llm_int8_skip_modules"):
            return None  # then transformers converts other layers than those that are noted here
        return mixed_bytes(requirements, self.convert(config, options))

    def convert(self, config: Mapping[str, Any] | None, options: Any) -> Any:
        """What the matrix of a linear layer takes, as a function of its `Weight`."""
        raise NotImplementedError

    def converted(self, module: nn.Module) -> bool:
        kind = type(module)
        return kind.__name__ == self.layer and kind.__module__.startswith("bitsandbytes.")


def rows(weight: Weight) -> int:
    assert weight.linear is not None  # `mixed_bytes` asks for linear layers only
    return weight.linear[0]
