"""``int8-cpu``: linear layers of 8 bits in groups, with activations of bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import Quantizer, QuantizerCapabilities, Requirements
from jackfield.contracts.checkpoint import NAMES, Field, one_of
from jackfield_plugins.quantizer.activations import Activations
from jackfield_plugins.quantizer.groupwise import Groupwise


@dataclass(frozen=True)
class Int8CpuOptions:
    """`group_size` inputs share a scale of 16 bits: 32 takes 8.5 bits a weight, 64 takes 8.25, 128
    takes 8.125; 32 is taken where nothing is said.

    `head`: with 8 the output head is stored too; where it is tied it becomes a copy of its own, and
    the embedding stays. None: as it is.

    `activations`: `dtype` computes with them as they are; `int8` rounds what enters a linear layer
    to 8 bits, 32 that share a scale, as llama.cpp does: faster, and a little less exact. None: what
    a checkpoint says, or `dtype`.
    """

    group_size: Literal[32, 64, 128] | None = None
    head: Literal[8] | None = None
    activations: Activations | None = None


class Int8Cpu(Groupwise):
    """Symmetric integers of 8 bits with a scale a group, by the largest of each."""

    name = "int8-cpu"
    bits = 8
    #: measured: 0.0060, 0.0064, 0.0068
    errors: ClassVar[Mapping[int, float]] = {32: 0.007, 64: 0.008, 128: 0.009}
    options = Int8CpuOptions
    fields: ClassVar[Mapping[str, Field]] = {
        "group_size": one_of(32, 64, 128),
        "head": one_of(None, 8),
        "activations": one_of("dtype", "int8"),
        "modules_to_not_convert": NAMES,
    }
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16", "float32"}),
        devices=frozenset({"cpu"}),
        batch_invariant=True,
        compiles=True,
        tensor_parallel=True,
    )

    def meant(self, requirements: Requirements | None, options: Any) -> dict[str, Any]:
        meant = super().meant(requirements, options)
        return meant if meant["kernel"] == "int8" else meant | {"kernel": "native"}


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Int8Cpu()]
