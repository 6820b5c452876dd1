"""``flash_attention_2``: FlashAttention-2 (Dao 2023, arXiv:2307.08691) on CUDA."""

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
    TorchVarlen,
    VarlenAttention,
)
from jackfield_plugins.devices import capabilities, capabilities_here


@dataclass(frozen=True)
class FlashAttention2Options:
    """`source`: whose kernel. "auto" is the flash-attn package, then the hub's, then torch's.

    "installed" is the same without the hub's.
    """

    source: Literal["auto", "installed", "package", "hub", "torch"] = "auto"


class FlashAttention2(VarlenAttention):
    """Pages are read in place where the page size is a multiple of 256."""

    name = "flash_attention_2"
    options = FlashAttention2Options
    capabilities = FLASH
    places: ClassVar[dict[str, Source]] = {
        "package": Package("flash_attn", ("flash-attn", "flash_attn")),
        "hub": HubKernel("kernels-community/flash-attn2", "v4"),
        "torch": TorchVarlen(),
    }

    def rank(self, requirements: Requirements) -> int | None:
        """Before Triton's in the packed layout, unless pages are cut so that it cannot read them.

        Padded rows would have to be brought together for it in every layer.
        """
        if requirements.layout != "packed" or requirements.device != "cuda":
            return None
        from jackfield_plugins.attention.published import FLASH_PAGE_MULTIPLE

        multiple: int | None = FLASH_PAGE_MULTIPLE
        if not requirements.elsewhere:
            source, found, _ = self._choose(requirements, self.auto_options())
            if source is not None:  # torch 2.11's own kernel reads no pages at all
                multiple = found
        return 60 if multiple and (requirements.page_size or 0) % multiple == 0 else 40

    def auto_options(self) -> FlashAttention2Options:
        """Nothing is fetched that nobody named."""
        return FlashAttention2Options("installed")

    def available(self) -> list[str]:
        import torch

        if not torch.cuda.is_available():
            return ["needs a CUDA GPU; none is here"]
        return _too_old([max(capabilities_here())])

    def refuse(self, requirements: Requirements, options: FlashAttention2Options) -> list[str]:
        return _too_old(capabilities(requirements)) or super().refuse(requirements, options)

    def sources(self, options: FlashAttention2Options) -> Sequence[Source]:
        asked = options.source
        if asked == "installed":
            return [self.places["package"], self.places["torch"]]
        return [s for name, s in self.places.items() if asked in ("auto", name)]


def _too_old(gpus: list[tuple[int, int]]) -> list[str]:
    return [
        f"needs a GPU of compute capability 8.0 or later; this one has {major}.{minor}"
        for major, minor in gpus
        if major < 8
    ][:1]


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [FlashAttention2()]
