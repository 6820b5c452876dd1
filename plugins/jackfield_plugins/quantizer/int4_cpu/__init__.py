"""``int4-cpu``: linear layers of 4 bits in groups, with activations of bfloat16.

Quantizes while weights are read, so that little more than the quantized model is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    BindContext,
    GivenConfig,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
)
from jackfield.contracts.quantizing import method, mixed_bytes

if TYPE_CHECKING:
    from torch import nn
    from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "int4-cpu"  # in the config of a checkpoint
GROUP_SIZE = 32


@dataclass(frozen=True)
class Int4CpuOptions:
    """`group_size` inputs share a scale of 16 bits: 32 takes 4.5 bits a weight, 128 takes 4.125.

    `kernel`: `native` is written here and compiled once, `torch` is torch's; `auto` takes torch's
    where the other cannot be compiled, with a warning.
    """

    group_size: Literal[32, 64, 128] | None = None
    kernel: Literal["auto", "native", "torch"] = "auto"


class Int4Cpu(Quantizer):
    """Symmetric integers of 4 bits with a scale a group, found by least squares."""

    name = "int4-cpu"
    options = Int4CpuOptions
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16"}), devices=frozenset({"cpu"}), adapters=True
    )

    def reads(self, stored: Mapping[str, Any]) -> bool:
        if method(stored) != METHOD:
            return False
        from jackfield_plugins.quantizer.int4_cpu.loading import register

        register()
        return True

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        group = (requirements.stored or {}).get("group_size")
        if group is not None and getattr(options, "group_size", None) not in (None, group):
            reasons.append(f"the checkpoint has groups of {group}, not of {options.group_size}")
        if not reasons and (kernel := _kernel(options)) == "native":
            from jackfield_plugins.quantizer.int4_cpu.kernels import why_torch

            reasons = why_torch(kernel)
        return reasons

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        from jackfield_plugins.quantizer.int4_cpu.kernels import why_torch

        group = _group_size(requirements.stored, options)
        of_group = 4 if why_torch(_kernel(options)) else 2  # torch's keeps a zero point as well

        def size(out_features: int, in_features: int) -> int | None:
            if in_features % group:
                return None
            filled = -(-out_features // 64) * 64  # kernels lay out 64 outputs together
            return filled * (in_features // 2 + in_features // group * of_group)

        return mixed_bytes(requirements, size)

    def make_config(self, context: BindContext) -> QuantizationConfigMixin:
        from jackfield_plugins.quantizer.int4_cpu.loading import Int4CpuConfig, register

        register()
        options = context.options
        group = options.group_size or GROUP_SIZE
        return Int4CpuConfig(group_size=group, kernel=options.kernel)

    def converted(self, module: nn.Module) -> bool:
        from jackfield_plugins.quantizer.int4_cpu.linear import GroupwiseLinear

        return isinstance(module, GroupwiseLinear)


def _kernel(options: Any) -> str:
    return str((options.config if isinstance(options, GivenConfig) else options).kernel)


def _group_size(stored: Mapping[str, Any] | None, options: Any) -> int:
    given = options.config if isinstance(options, GivenConfig) else options
    return int((stored or {}).get("group_size") or given.group_size or GROUP_SIZE)


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Int4Cpu()]
