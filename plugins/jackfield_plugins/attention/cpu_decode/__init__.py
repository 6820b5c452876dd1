"""``cpu_decode``: attention on the CPU through kernels written here.

Decoding reads every key and value once, so the time to read them is the least there can be.
torch's kernel reads them once for every query head; here all heads that share them read them
together, in full vectors, in parts of a sequence side by side (`kernel.cpp`). Prompts in pages go
in blocks of queries and keys, of which only those are computed that are seen (`prompts.h`). Padded
prompts are torch's sdpa.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
    Requirements,
)
from jackfield_plugins.attention.cpu_decode.build import KERNEL
from jackfield_plugins.attention.sdpa import SdpaAttention, torch_attention

if TYPE_CHECKING:
    import torch


class CpuDecodeAttention(Attention):
    """Compiled when it is first bound; padded prompts are torch's sdpa."""

    name = "cpu_decode"
    auto_rank = 20  # before sdpa, which goes sequence by sequence
    capabilities = AttentionCapabilities(
        layouts=SdpaAttention.capabilities.layouts,
        devices=frozenset({"cpu"}),
        features=SdpaAttention.capabilities.features - {"own_mask"},  # takes boolean masks only
        batch_invariant=True,  # chunks of keys are fixed
    )

    def available(self) -> list[str]:
        return KERNEL.cannot_build()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Compiles the kernel where all else is well, so that `auto` may rely on it."""
        reasons = super().refuse(requirements, options)
        return reasons or KERNEL.cannot_load()

    def bind(self, context: BindContext) -> BoundAttention:
        from jackfield_plugins.attention.cpu_decode.call import SHORT, Kernel
        from jackfield_plugins.attention.cpu_decode.prompts import Prompts

        kernel, prompts, sdpa = Kernel(), Prompts(), torch_attention()
        prefill = sdpa.forward

        def forward(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            if query.shape[2] > 1:
                return prefill(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
            return kernel.padded(query, key, value, attention_mask, kwargs.get("scaling")), None

        def packed(
            module: torch.nn.Module,
            query: torch.Tensor,
            layer: PackedLayer,
            scaling: float | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            blocks = layer.tables.blocks
            if layer.step.max_seqlen_q <= SHORT and blocks is None:
                return kernel.packed(query, layer, scaling)
            if any(span.query_len <= SHORT for span in layer.step.spans):
                output = kernel.packed(query, layer, scaling)
            else:
                output = query.new_empty(*query.shape[:2], layer.values.shape[3])
            prompts.attend(query, layer, output, scaling, SHORT)
            return output

        source = KERNEL.built_with()
        return BoundAttention(
            forward,
            sdpa.mask,
            packed,
            source=source,
            native=kernel.native,
            native_again=kernel.native_again,
        )


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [CpuDecodeAttention()]
