"""``int4-cpu``: linear layers of 4 bits in groups, with activations of bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import Quantizer, QuantizerCapabilities
from jackfield.contracts.checkpoint import NAMES, Field, one_of
from jackfield_plugins.quantizer.activations import Activations
from jackfield_plugins.quantizer.groupwise import Groupwise


@dataclass(frozen=True)
class Int4CpuOptions:
    """`group_size` inputs share a scale of 16 bits: 32, which is taken where nothing is said, takes
    4.5 bits a weight, 64 takes 4.25, 128 takes 4.125.

    `head`: the output head is stored too, in groups of so many bits; where it is tied it becomes a
    copy of its own, and the embedding stays. None: as it is. `kernel`: `native` is written here and
    compiled once, `torch` is torch's; `auto` takes torch's where the other cannot be compiled, with
    a warning.

    `activations`: `dtype` computes with them as they are; `int8` rounds what enters a linear layer
    to 8 bits, 32 that share a scale, as llama.cpp does: faster, and a little less exact. None: what
    a checkpoint says, or `dtype`.
    """

    group_size: Literal[32, 64, 128] | None = None
    head: Literal[4, 8] | None = None
    kernel: Literal["auto", "native", "torch"] = "auto"
    activations: Activations | None = None

    def __post_init__(self) -> None:
        if self.head == 8 and self.kernel == "torch":
            raise ValueError("torch's kernel has no weights of 8 bits in groups; take head=4")
        if self.activations == "int8" and self.kernel == "torch":
            raise ValueError("torch's kernel takes activations as they are; leave one of them out")


class Int4Cpu(Groupwise):
    """Symmetric integers of 4 bits with a scale a group, found by least squares."""

    name = "int4-cpu"
    bits = 4
    #: measured: 0.087, 0.090, 0.095
    errors: ClassVar[Mapping[int, float]] = {32: 0.095, 64: 0.11, 128: 0.125}
    options = Int4CpuOptions
    fields: ClassVar[Mapping[str, Field]] = {
        "group_size": one_of(32, 64, 128),
        "head": one_of(None, 4, 8),
        "activations": one_of("dtype", "int8"),
        "modules_to_not_convert": NAMES,
    }
    capabilities = QuantizerCapabilities(
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cpu"}),
        batch_invariant=True,
        compiles=True,
        tensor_parallel=True,
    )


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Int4Cpu()]
