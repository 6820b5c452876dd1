"""``gguf``: the blocks of a GGUF file, kept and computed as they are on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
from jackfield.contracts.checkpoint import Field
from jackfield.contracts.quantizing import GGUF_BLOCKS, method, mixed_bytes, plain_bytes
from jackfield_plugins.quantizer.activations import (
    INT8_ERROR,
    Activations,
    refuse_of_live,
    rounds,
)

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("jackfield")

#: In which the kernel computes.
DTYPES = frozenset({"bfloat16", "float32"})


@dataclass(frozen=True)
class GgufOptions:
    """`kernel`: `native` keeps blocks and is written here, compiled once; `none` unpacks all
    weights as they are read; `auto` does so where there can be no kernel, with a warning.

    `activations`: `dtype` computes with them as they are; `int8` rounds what enters a linear layer
    to 8 bits, 32 that share a scale, as llama.cpp does: faster, and a little less exact. None:
    `dtype`, and of a live model what it does.
    """

    kernel: Literal["auto", "native", "none"] = "auto"
    activations: Activations | None = None


def _are_tensors(given: Any) -> bool:
    """name -> type and shape."""
    return isinstance(given, dict) and all(
        isinstance(entry, list)
        and len(entry) == 3
        and isinstance(entry[0], str)
        and all(type(size) is int and size > 0 for size in entry[1:])
        for entry in given.values()
    )


class Gguf(Quantizer):
    """Reads what `jackfield.load` finds in a GGUF file; quantizes nothing itself.

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K stay in blocks, of linear layers, embeddings
    and the head; other types are unpacked.
    """

    name = "gguf"
    options = GgufOptions
    quantizes = False
    fields: ClassVar[Mapping[str, Field]] = {
        "tensors": Field(_are_tensors, "types and shapes of tensors", needed=True)
    }
    capabilities = QuantizerCapabilities(batch_invariant=True, compiles=True, relative_error=0.0)

    def reads(self, stored: Mapping[str, Any]) -> bool:
        if method(stored) != GGUF_BLOCKS:
            return False
        from jackfield_plugins.quantizer.gguf.loading import register

        register()
        return True

    def native_operators(self) -> NativeOperators:
        from jackfield_plugins.quantizer.gguf.native import native_linear, native_rows

        return {
            "jackfield.gguf_linear.default": native_linear,
            "jackfield.gguf_rows.default": native_rows,
        }

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options) or refuse_of_live(requirements, options)
        if not reasons and (getattr(options, "kernel", None) == "native" or rounds(options)):
            reasons = _why_unpacked(requirements, options)
            if not reasons and rounds(options):
                return _why_not_rounded(requirements)
        return reasons

    def relative_error(self, options: Any) -> float | None:
        return INT8_ERROR if rounds(options) else 0.0

    def dtypes(self, requirements: Requirements, options: Any) -> frozenset[str]:
        named = getattr(options, "kernel", None) == "native"
        return DTYPES if named else self.capabilities.dtypes

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        if not requirements.stored or _why_unpacked(requirements, options):
            return plain_bytes(requirements)
        from jackfield_plugins.quantizer.gguf.native import BLOCKS, Matrix

        tensors = requirements.stored["tensors"]

        def size(weight: Weight) -> int | None:
            kind, *shape = tensors.get(weight.name, [""])
            return Matrix(kind, *shape).nbytes if kind in BLOCKS else None

        return mixed_bytes(requirements, size)

    def bind(self, context: BindContext) -> Quantization:
        needs: Requirements | None = context.requirements
        if needs is None or needs.stored is None:
            return Quantization(None)
        if reasons := _why_unpacked(needs, context.options):
            if getattr(context.options, "kernel", None) == "auto":
                logger.warning("gguf unpacks all weights (%s)", "; ".join(reasons))
            return Quantization(None)
        from jackfield_plugins.quantizer.gguf.loading import GgufBlocksConfig, finish

        config = GgufBlocksConfig(dict(needs.stored["tensors"]))
        return Quantization(config, finish=partial(finish, int8=rounds(context.options)))

    def make_config(self, context: BindContext) -> None:
        return None  # refused before, unless the checkpoint is a GGUF file

    def converted(self, module: nn.Module) -> bool:
        from jackfield_plugins.quantizer.gguf.layers import GgufEmbedding, GgufLinear

        return isinstance(module, GgufLinear | GgufEmbedding)

    def runs_on(self, module: nn.Module) -> str:
        """The type of its blocks, and whether activations are rounded."""
        rounded = " with int8 activations" if getattr(module, "int8", False) else ""
        return f"in {module.matrix.kind}{rounded}"  # type: ignore[union-attr]


def _why_not_rounded(requirements: Requirements) -> list[str]:
    """Why there is no kernel that rounds activations; an empty list: there is one."""
    from jackfield_plugins.quantizer.gguf.native import INT8_KERNELS, cannot_load

    return cannot_load(INT8_KERNELS, _kinds(requirements))


def _kinds(requirements: Requirements) -> set[str]:
    """The types of a file's tensors."""
    return {kind for kind, *_ in (requirements.stored or {}).get("tensors", {}).values()}


def _why_unpacked(requirements: Requirements, options: Any) -> list[str]:
    """Why blocks cannot be kept for this job; an empty list: they are."""
    from jackfield_plugins.quantizer.gguf.native import KERNELS, cannot_load

    if getattr(options, "kernel", None) == "none":
        if rounds(options):
            return ["activations=int8 computes with blocks, which kernel=none unpacks; drop one"]
        return ["as kernel=none asks"]
    if requirements.device not in ("cpu", None):
        return [f"keeps blocks on the CPU, not on {requirements.device}"]
    if requirements.dtype not in DTYPES:
        return [f"computes with blocks in bfloat16 or float32, not in {requirements.dtype}"]
    return cannot_load(KERNELS, _kinds(requirements))


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [Gguf()]
