"""``transformers``: every method that transformers itself knows, where nothing better is named."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    GivenConfig,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    quieted,
)
from jackfield.contracts.checkpoint import shown
from jackfield.contracts.quantizing import method
from jackfield.errors import first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers.utils.quantization_config import QuantizationConfigMixin


def _objection(stored: Mapping[str, Any]) -> str | None:
    """What transformers says against the fields themselves, whatever is installed."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        with quieted("transformers"):
            AutoQuantizationConfig.from_dict(copy.deepcopy(dict(stored)))
    except (ImportError, RuntimeError):
        return None
    except Exception as error:  # noqa: BLE001 - of many kinds, as nothing checks types
        return first_line(error)
    return None


class KnownQuantizer(Quantizer):
    """A checkpoint, or a config object, of a method that has no backend of its own here.

    transformers' own quantizer for it says what this machine lacks.
    """

    name = "transformers"
    capabilities = QuantizerCapabilities()

    def reads(self, stored: Mapping[str, Any]) -> bool:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        return method(stored) in AUTO_QUANTIZATION_CONFIG_MAPPING

    def odd(self, requirements: Requirements) -> list[str]:
        stored = requirements.stored or {}
        if (error := _objection(stored)) is None:
            return []
        for name, value in stored.items():
            if _objection({key: stored[key] for key in stored if key != name}) is None:
                return [f"{name} is {shown(value)}, which transformers does not take: {error}"]
        return [f"transformers does not take it: {error}"]

    def rank(self, requirements: Requirements) -> int | None:
        """After the backends that are made for one method."""
        return None if super().rank(requirements) is None else 1

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if reasons:
            return reasons
        from transformers.quantizers.auto import AutoHfQuantizer

        given: Any = options.config if isinstance(options, GivenConfig) else requirements.stored
        if given is None:
            return ["has no method of its own; give a transformers quantization config object"]
        try:
            stored = requirements.stored is not None
            quantizer = AutoHfQuantizer.from_config(given, pre_quantized=stored)
            asked = getattr(quantizer.quantization_config, "dequantize", False)
            with quieted("transformers"):
                quantizer.validate_environment(device_map={"": requirements.device or "cpu"})
        except Exception as error:  # noqa: BLE001 - whatever a library says is the reason
            return [str(error).strip().partition("\n")[0] or type(error).__name__]
        if getattr(quantizer.quantization_config, "dequantize", False) and not asked:
            what = f"has no {method(quantizer.quantization_config.to_dict())} layers"
            where = f"on {requirements.device}, and transformers would store whole weights instead"
            return [f"{what} {where}"]
        return []

    def make_config(self, context: BindContext) -> QuantizationConfigMixin | None:
        return None  # refused before, unless the checkpoint or the caller has one

    def converted(self, module: nn.Module) -> bool:
        from torch import nn

        return hasattr(module, "in_features") and type(module) is not nn.Linear


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [KnownQuantizer()]
