"""Linear layers of small integers with a scale a group: what ``int4-cpu`` and ``int8-cpu`` share.

They quantize while weights are read, so that little more than the quantized model is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts import (
    BindContext,
    NativeOperators,
    Quantization,
    Quantizer,
    Requirements,
    Weight,
)
from jackfield.contracts.checkpoint import first
from jackfield.contracts.quantizing import cut_groups, in_force, method, mixed_bytes
from jackfield_plugins.quantizer.activations import INT8_ERROR, refuse_of_live, rounds

if TYPE_CHECKING:
    from torch import nn
    from transformers.utils.quantization_config import QuantizationConfigMixin


class Groupwise(Quantizer):
    """Symmetric integers with a scale a group. Its `name` is the method in a checkpoint's config.

    Attributes:
        bits: Of a weight: 4 or 8.
        group_size: Inputs that share a scale, where nobody says how many.
        errors: How far a layer's outputs may be off, as a share of their size, by group size.
    """

    bits: ClassVar[int]
    group_size: ClassVar[int] = 32
    errors: ClassVar[Mapping[int, float]]

    def native_operators(self) -> NativeOperators:
        from jackfield_plugins.quantizer.groupwise.operator import NAME, native

        return {NAME: native}

    def relative_error(self, options: Any) -> float | None:
        group = getattr(getattr(options, "config", options), "group_size", None)
        error = self.errors[group or self.group_size]
        return error + INT8_ERROR if rounds(options) else error

    def reads(self, stored: Mapping[str, Any]) -> bool:
        if method(stored) != self.name:
            return False
        from jackfield_plugins.quantizer.groupwise.loading import register

        register(self.name, self.bits)
        return True

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options) or refuse_of_live(requirements, options)
        stored = requirements.stored or {}
        for name in ("group_size", "head"):
            asked = getattr(options, name, None)
            if requirements.stored and asked not in (None, stored.get(name)):
                reasons.append(f"the checkpoint has {name}={stored.get(name)}, not {asked}")
        meant = self.meant(requirements, options)
        return reasons or first(
            check(requirements, meant)
            for check in (_no_layers, _no_head, _not_shared, self._refuse_kernel)
        )

    def _refuse_kernel(self, requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
        from jackfield_plugins.quantizer.groupwise.choosing import NAMED, why_torch

        missing = why_torch(meant["kernel"])
        if meant["kernel"] in NAMED:
            return missing
        where = f"torch's kernel here ({'; '.join(missing)})"
        if missing and meant["head"] == 8:
            return [f"runs on {where}, which has no weights of 8 bits; take head=4"]
        if missing and requirements.batch_invariant:
            return [f"is batch-invariant on its own kernel only, and runs on {where}"]
        return []

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        from jackfield_plugins.quantizer.groupwise.choosing import NAMED, why_torch

        meant = self.meant(requirements, options)
        group = int(meant["group_size"])
        # torch's kernel keeps a zero point as well.
        of_group = 4 if meant["kernel"] not in NAMED and why_torch(meant["kernel"]) else 2

        def size(shape: tuple[int, int] | None, bits: int = self.bits) -> int | None:
            if shape is None or shape[1] % group:
                return None
            filled = -(-shape[0] // 64) * 64  # kernels lay out 64 outputs together
            return filled * (shape[1] * bits // 8 + shape[1] // group * of_group)

        total = mixed_bytes(
            requirements, lambda w: size(w.linear) if _has_groups(w, group) else None
        )
        if not requirements.weights or not meant["head"]:
            return total
        head = size(requirements.head, int(meant["head"]))
        if head is None or requirements.tied_head:
            return total + (head or 0)
        return total + head - _plain_head(requirements)

    def bind(self, context: BindContext) -> Quantization:
        needs: Requirements | None = context.requirements
        bound, meant = super().bind(context), self.meant(needs, context.options)
        if needs is None or not needs.stored:
            return bound
        from jackfield_plugins.quantizer.groupwise.checkpoint import misfits
        from jackfield_plugins.quantizer.groupwise.loading import compute_on

        return replace(
            bound,
            finish=partial(compute_on, kernel=meant["kernel"]),
            misfits=lambda tensors: misfits(self.name, self.bits, needs, meant, tensors),
        )

    def make_config(self, context: BindContext) -> QuantizationConfigMixin:
        from jackfield_plugins.quantizer.groupwise.loading import GroupwiseConfig, register

        register(self.name, self.bits)
        return GroupwiseConfig(self.name, **self.meant(context.requirements, context.options))

    def converted(self, module: nn.Module) -> bool:
        from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear

        return isinstance(module, GroupwiseLinear)

    def runs_on(self, module: nn.Module) -> str | None:
        """Whether activations are rounded."""
        rounded = module.product.name == "int8"  # type: ignore[union-attr]
        return "with int8 activations" if rounded else None

    def meant(self, requirements: Requirements | None, options: Any) -> dict[str, Any]:
        """`group_size`, `head` and `kernel`, by the checkpoint, a given config or the options."""
        given = in_force(requirements, options) if requirements is not None else None
        kernel = str(getattr(getattr(options, "config", options), "kernel", "auto"))
        asked = getattr(options, "activations", None) or (given or {}).get("activations")
        kernel = "int8" if asked == "int8" else kernel
        if given is not None:
            own = {name: given[name] for name in ("group_size", "head") if name in given}
            return {"group_size": self.group_size, "head": None, **own, "kernel": kernel}
        group_size = options.group_size or self.group_size
        return {"group_size": group_size, "head": options.head, "kernel": kernel}


def _no_layers(requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
    """Why nothing would be stored in groups."""
    group, name = int(meant["group_size"]), requirements.architecture
    weights = requirements.weights
    if meant["head"] or not weights or any(_has_groups(weight, group) for weight in weights):
        return []
    if not any(weight.linear for weight in weights):
        return [f"converts nn.Linear and Conv1D, and {name} has none but its head"]
    return [f"groups of {group} divide the inputs of no linear layer of {name}, its head aside"]


def _no_head(requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
    """Why the output head cannot be stored in groups."""
    if not meant["head"] or requirements.stored or not requirements.weights:
        return []
    group, name = int(meant["group_size"]), requirements.architecture
    if requirements.head is None:
        return [f"stores heads that are nn.Linear, and that of {name} is none; leave 'head' out"]
    if requirements.head[1] % group:
        inputs = requirements.head[1]
        return [f"groups of {group} do not divide the {inputs} inputs of the output head"]
    return []


def _not_shared(requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
    """Why processes that share a model would not have what one process has."""
    if requirements.tp_size > 1 and meant["head"]:
        why = f"head={meant['head']} stores the output head of one process"
        return [f"{why}, and tp_size={requirements.tp_size} shares it; leave 'head' out"]
    return cut_groups(requirements, int(meant["group_size"]))


def _has_groups(weight: Weight, group: int) -> bool:
    """Whether it is stored in groups, as it is in one process."""
    whole = weight.whole or weight.linear
    return whole is not None and whole[1] % group == 0


def _plain_head(requirements: Requirements) -> int:
    """What the head takes where it is not stored in groups."""
    assert requirements.head is not None
    size = requirements.head[0] * requirements.head[1]
    name = Weight("", size)
    return mixed_bytes(replace(requirements, weights=(name,)), lambda _: None)
