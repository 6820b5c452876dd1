"""``flash_attention_3``: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities, Requirements
from jackfield_plugins.attention.sources import HubKernel, Package, Source, VarlenAttention


@dataclass(frozen=True)
class FlashAttention3Options:
    """`source`: whose kernel. "auto" is the flash_attn_interface package, then the hub's."""

    source: Literal["auto", "package", "hub"] = "auto"


class FlashAttention3(VarlenAttention):
    """The first choice of `auto` on the GPUs that it is for."""

    name = "flash_attention_3"
    options = FlashAttention3Options
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        devices=frozenset({"cuda"}),
        features=frozenset({"grouped_query", "sliding_window", "softcap"}),
        head_sizes=frozenset(range(8, 257, 8)),
    )
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
        major, minor = torch.cuda.get_device_capability()
        if major != 9:
            return [f"needs a Hopper GPU (compute capability 9.0); this one has {major}.{minor}"]
        return []

    def sources(self, options: FlashAttention3Options) -> Sequence[Source]:
        return [s for name, s in self.places.items() if options.source in ("auto", name)]


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [FlashAttention3()]
