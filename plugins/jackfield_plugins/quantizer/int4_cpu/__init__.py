"""``int4-cpu``: linear layers of 4 bits in groups, with activations of bfloat16.

Quantizes while weights are read, so that little more than the quantized model is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from jackfield.contracts.checkpoint import NAMES, Field, Form, Tensors, first, one_of, paths, unlike
from jackfield.contracts.quantizing import in_force, method, mixed_bytes

if TYPE_CHECKING:
    from torch import nn
    from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "int4-cpu"  # in the config of a checkpoint
GROUP_SIZE = 32

#: of a layer's outputs by the size of groups, measured: 0.087, 0.090 and 0.095
ERRORS = {32: 0.095, 64: 0.11, 128: 0.125}


@dataclass(frozen=True)
class Int4CpuOptions:
    """`group_size` inputs share a scale of 16 bits: 32, which is taken where nothing is said, takes
    4.5 bits a weight, 64 takes 4.25, 128 takes 4.125.

    `head`: the output head is stored too, in groups of so many bits; where it is tied it becomes a
    copy of its own, and the embedding stays. None: as it is. `kernel`: `native` is written here and
    compiled once, `torch` is torch's; `auto` takes torch's where the other cannot be compiled, with
    a warning.
    """

    group_size: Literal[32, 64, 128] | None = None
    head: Literal[4, 8] | None = None
    kernel: Literal["auto", "native", "torch"] = "auto"

    def __post_init__(self) -> None:
        if self.head == 8 and self.kernel == "torch":
            raise ValueError("torch's kernel has no weights of 8 bits in groups; take head=4")


class Int4Cpu(Quantizer):
    """Symmetric integers of 4 bits with a scale a group, found by least squares."""

    name = "int4-cpu"
    options = Int4CpuOptions
    fields: ClassVar[Mapping[str, Field]] = {
        "group_size": one_of(32, 64, 128),
        "head": one_of(None, 4, 8),
        "modules_to_not_convert": NAMES,
    }
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cpu"}),
        batch_invariant=True,
        compiles=True,
    )

    def native_operators(self) -> NativeOperators:
        from jackfield_plugins.quantizer.int4_cpu.operator import native

        return {"jackfield.int4_cpu_linear.default": native}

    def relative_error(self, options: Any) -> float | None:
        group = getattr(getattr(options, "config", options), "group_size", None)
        return ERRORS[group or GROUP_SIZE]

    def reads(self, stored: Mapping[str, Any]) -> bool:
        if method(stored) != METHOD:
            return False
        from jackfield_plugins.quantizer.int4_cpu.loading import register

        register()
        return True

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        stored = requirements.stored or {}
        for name in ("group_size", "head"):
            asked = getattr(options, name, None)
            if requirements.stored and asked not in (None, stored.get(name)):
                reasons.append(f"the checkpoint has {name}={stored.get(name)}, not {asked}")
        meant = _meant(requirements, options)
        return reasons or first(
            check(requirements, meant) for check in (_no_layers, _no_head, self._refuse_kernel)
        )

    def _refuse_kernel(self, requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
        from jackfield_plugins.quantizer.int4_cpu.kernels import why_torch

        kernel = str(meant.get("kernel") or "auto")
        missing = why_torch(kernel)
        if kernel == "native":
            return missing
        where = f"torch's kernel here ({'; '.join(missing)})"
        if missing and meant["head"] == 8:
            return [f"runs on {where}, which has no weights of 8 bits; take head=4"]
        if missing and requirements.batch_invariant:
            return [f"is batch-invariant on its own kernel only, and runs on {where}"]
        return []

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        from jackfield_plugins.quantizer.int4_cpu.kernels import why_torch

        meant = _meant(requirements, options)
        group = int(meant["group_size"])
        # torch's kernel keeps a zero point as well.
        of_group = 4 if why_torch(str(meant.get("kernel") or "auto")) else 2

        def size(shape: tuple[int, int] | None, bits: int = 4) -> int | None:
            if shape is None or shape[1] % group:
                return None
            filled = -(-shape[0] // 64) * 64  # kernels lay out 64 outputs together
            return filled * (shape[1] * bits // 8 + shape[1] // group * of_group)

        total = mixed_bytes(requirements, lambda weight: size(weight.linear))
        if not requirements.weights or not meant.get("head"):
            return total
        head = size(requirements.head, int(meant["head"]))
        if head is None or requirements.tied_head:
            return total + (head or 0)
        return total + head - _plain_head(requirements)

    def bind(self, context: BindContext) -> Quantization:
        needs: Requirements | None = context.requirements
        bound, meant = super().bind(context), _meant(needs, context.options)
        if needs is None or not needs.stored:
            return bound
        return replace(bound, misfits=lambda tensors: _misfits(needs, meant, tensors))

    def make_config(self, context: BindContext) -> QuantizationConfigMixin:
        from jackfield_plugins.quantizer.int4_cpu.loading import Int4CpuConfig, register

        register()
        return Int4CpuConfig(**_meant(context.requirements, context.options))

    def converted(self, module: nn.Module) -> bool:
        from jackfield_plugins.quantizer.int4_cpu.linear import GroupwiseLinear

        return isinstance(module, GroupwiseLinear)


def _no_layers(requirements: Requirements, meant: Mapping[str, Any]) -> list[str]:
    """Why nothing would be stored in groups."""
    group, name = int(meant["group_size"]), requirements.architecture
    layers = [w.linear for w in requirements.weights if w.linear is not None]
    if meant["head"] or not requirements.weights or any(n % group == 0 for _, n in layers):
        return []
    if not layers:
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


def _misfits(needs: Requirements, meant: Mapping[str, Any], tensors: Tensors) -> list[str]:
    """Why the tensors of a checkpoint's files are not what its config says; the first reason."""
    found = paths(tensors, ".qweight", ".scales")
    if not found:
        return ["its config says int4-cpu, and none of its weights is quantized"]
    known = {w.name.removesuffix(".weight"): w.linear for w in needs.weights if w.linear}
    group, head = int(meant["group_size"]), int(meant["head"] or 4)
    says = f"its config says group_size={group} and head={meant['head']}"
    reasons = first(_unlike(path, known.get(path), group, head, tensors) for path in found)
    return [f"{says}: {reasons[0]}"] if reasons else []


def _unlike(
    path: str, linear: tuple[int, int] | None, group: int, head: int, tensors: Tensors
) -> list[str]:
    """What of one layer is not in canonical form.

    One that is not among the linear layers is the head, or has another name in the model.
    """
    if linear is not None:
        return unlike(tensors, _forms(path, linear, group, 4))
    packed = tensors.get(f"{path}.qweight")
    rows, filled = packed.shape if packed is not None and len(packed.shape) == 2 else (0, 0)
    tried = [
        unlike(tensors, _forms(path, (rows, filled * 8 // bits), group, bits)) for bits in (4, head)
    ]
    return [] if [] in tried else tried[0]


def _forms(path: str, linear: tuple[int, int], group: int, bits: int) -> dict[str, Form]:
    rows, columns = linear
    return {
        f"{path}.qweight": Form(("U8",), (rows, columns * bits // 8)),
        f"{path}.scales": Form(("BF16",), (rows, columns // group)),
    }


def _meant(requirements: Requirements | None, options: Any) -> dict[str, Any]:
    """`group_size`, `head` and `kernel`, by the checkpoint, a given config or the options."""
    given = in_force(requirements, options) if requirements is not None else None
    kernel = getattr(getattr(options, "config", options), "kernel", "auto")
    if given is not None:
        return {"group_size": GROUP_SIZE, "head": None, **_own(given), "kernel": kernel}
    group_size = options.group_size or GROUP_SIZE
    return {"group_size": group_size, "head": options.head, "kernel": kernel}


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("group_size", "head") if name in given}


def _plain_head(requirements: Requirements) -> int:
    """What the head takes where it is not stored in groups."""
    assert requirements.head is not None
    size = requirements.head[0] * requirements.head[1]
    name = Weight("", size)
    return mixed_bytes(replace(requirements, weights=(name,)), lambda _: None)


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Int4Cpu()]
