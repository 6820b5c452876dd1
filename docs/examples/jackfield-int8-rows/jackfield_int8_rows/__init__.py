"""Quantizer `int8-rows`: weights as integers of 8 bits, one scale for each output.

It quantizes while weights are read, and reads what it saved. `layers.py` has its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Weight,
)
from jackfield.contracts.checkpoint import Form, unlike
from jackfield.contracts.quantizing import method, mixed_bytes

if TYPE_CHECKING:  # this module is imported whenever jackfield looks for backends: keep it light
    from torch import nn
    from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "jackfield-int8-rows"  # what a checkpoint says of itself


class Int8RowsBackend(Quantizer):
    """What is declared here is what `jackfield check` proves; anything else is refused."""

    name = "int8-rows"
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        devices=frozenset({"cpu", "cuda"}),
        compiles=True,  # its layers are plain torch
    )

    def reads(self, stored: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this `quantization_config` is its own. It comes from a file."""
        if method(stored) != METHOD:
            return False
        from jackfield_int8_rows.layers import register

        register()  # in the wake of a yes, transformers looks the classes up
        return True

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Before weights are read: a model in which there would be nothing to convert."""
        reasons = super().refuse(requirements, options)
        if requirements.weights and not any(map(is_linear, requirements.weights)):
            reasons.append(
                f"converts nn.Linear, and {requirements.architecture} has none but its head"
            )
        return reasons

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        """A byte for each weight, four for each scale. What has another size is `converted`."""

        def size(weight: Weight) -> int | None:
            if not is_linear(weight):
                return None  # stays as it is
            outputs, inputs = weight.linear
            return outputs * inputs + 4 * outputs

        return mixed_bytes(requirements, size)

    def bind(self, context: BindContext) -> Quantization:
        """A checkpoint whose tensors are not what it says is refused before anything is read."""
        needs, bound = context.requirements, super().bind(context)
        if needs is None or needs.stored is None:  # it quantizes, or plain transformers code asks
            return bound
        forms = {
            weight.name: Form(("I8",), weight.linear)
            for weight in needs.weights
            if is_linear(weight)
        }
        return replace(bound, misfits=lambda tensors: unlike(tensors, forms) if tensors else [])

    def make_config(self, context: BindContext) -> QuantizationConfigMixin:
        from jackfield_int8_rows.layers import RowwiseConfig, register

        register()
        return RowwiseConfig()

    def converted(self, module: nn.Module) -> bool:
        from jackfield_int8_rows.layers import RowwiseLinear

        return isinstance(module, RowwiseLinear)


def is_linear(weight: Weight) -> bool:
    """Whether it is the matrix of an nn.Linear other than the head; a Conv1D has it transposed."""
    return weight.linear is not None and not weight.transposed


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Int8RowsBackend()]
