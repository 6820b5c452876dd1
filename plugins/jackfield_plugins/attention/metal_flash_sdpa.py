"""``metal_flash_sdpa``: the flash kernel for Apple GPUs from the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities
from jackfield_plugins.attention.sources import HubKernel, Source, VarlenAttention


class MetalFlashSdpa(VarlenAttention):
    """Calls `flash_attention_varlen`, which every build of the kernel has: no window, no sinks."""

    name = "metal_flash_sdpa"
    auto_rank = 20  # before sdpa, which is slower on MPS
    auto_notice = (
        "it runs code from the hub, kernels-community/metal-flash-sdpa, locked by content; "
        "name 'sdpa' to opt out"
    )
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        devices=frozenset({"mps"}),
        features=frozenset({"grouped_query", "softcap"}),
        head_dims=frozenset({32, 64, 72, 80, 96, 128, 256}),
    )
    source: ClassVar[Source] = HubKernel(
        "kernels-community/metal-flash-sdpa", "v2", "flash_attention_varlen"
    )

    def available(self) -> list[str]:
        import torch

        if not torch.backends.mps.is_available():
            return ["needs an Apple GPU (MPS); none is here"]
        if importlib.util.find_spec("kernels") is None:
            return ["needs the package 'kernels': pip install jackfield[kernels]"]
        return []

    def sources(self, options: Any) -> Sequence[Source]:
        return [self.source]


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [MetalFlashSdpa()]
