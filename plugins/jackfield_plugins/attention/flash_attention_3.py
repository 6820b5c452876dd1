"""``flash_attention_3``: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import Attention, Requirements
from jackfield_plugins.attention.sources import (
    FLASH,
    HubKernel,
    Package,
    Source,
    VarlenAttention,
)
from jackfield_plugins.devices import capabilities, capabilities_here


@dataclass(frozen=True)
class FlashAttention3Options:
    """`source`: whose kernel. "auto" is the flash_attn_interface package, then the hub's."""

    source: Literal["auto", "package", "hub"] = "auto"


class FlashAttention3(VarlenAttention):
    """The first choice of `auto` on the GPUs that it is for."""

    name = "flash_attention_3"
    options = FlashAttention3Options
    capabilities = FLASH
    places: ClassVar[dict[str, Source]] = {
        "package": Package("flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
        "hub": HubKernel("kernels-community/flash-attn3", "v1"),
    }

    def rank(self, requirements: Requirements) -> int | None:
        packed = requirements.layout == "packed" and requirements.device == "cuda"
        return 70 if packed else None

    def auto_options(self) -> FlashAttention3Options:
        """Nothing is fetched that nobody named."""
        return FlashAttention3Options("package")

    def available(self) -> list[str]:
        import torch

        if not torch.cuda.is_available():
            return ["needs a CUDA GPU; none is here"]
        here = capabilities_here()
        return [] if any(major == 9 for major, _ in here) else _no_hopper(here)

    def refuse(self, requirements: Requirements, options: FlashAttention3Options) -> list[str]:
        return _no_hopper(capabilities(requirements)) or super().refuse(requirements, options)

    def sources(self, options: FlashAttention3Options) -> Sequence[Source]:
        return [s for name, s in self.places.items() if options.source in ("auto", name)]


def _no_hopper(gpus: list[tuple[int, int]]) -> list[str]:
    return [
        f"needs a Hopper GPU (compute capability 9.0); this one has {major}.{minor}"
        for major, minor in gpus
        if major != 9
    ][:1]


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [FlashAttention3()]
