"""Quantizer `native-rows`: weights as integers of 8 bits, one scale for each output, in C++.

It quantizes while weights are read, and reads what it saved. `layers.py` has its classes,
`operator.py` the product that they call, which steps of the compiler `native` run without Python.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    NativeOperators,
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

METHOD = "jackfield-native-rows"  # what a checkpoint says of itself


class NativeRowsBackend(Quantizer):
    """What is declared here is what `jackfield check` proves; anything else is refused."""

    name = "native-rows"
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float32"}),
        devices=frozenset({"cpu"}),
        compiles=True,  # its product is an operator with a fake
        batch_invariant=True,  # a row's sums are in one order, whatever other rows there are
    )

    def reads(self, stored: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this `quantization_config` is its own. It comes from a file."""
        if method(stored) != METHOD:
            return False
        from jackfield_native_rows.layers import register

        register()  # in the wake of a yes, transformers looks the classes up
        return True

    def available(self) -> list[str]:
        if importlib.util.find_spec(f"{__name__}._linear") is None:
            return ["its library was not compiled; pip install it again, with a C++ compiler"]
        return []

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
        from jackfield_native_rows.layers import RowwiseConfig, register

        register()
        return RowwiseConfig()

    def native_operators(self) -> NativeOperators:
        """What its layers call, by torch's name: library, operator and overload."""
        from jackfield_native_rows.operator import native

        return {"jackfield_native_rows.linear.default": native}

    def converted(self, module: nn.Module) -> bool:
        from jackfield_native_rows.layers import RowwiseLinear

        return isinstance(module, RowwiseLinear)


def is_linear(weight: Weight) -> bool:
    """Whether it is the matrix of an nn.Linear other than the head; a Conv1D has it transposed."""
    return weight.linear is not None and not weight.transposed


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [NativeRowsBackend()]
