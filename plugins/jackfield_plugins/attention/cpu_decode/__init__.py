"""``cpu_decode``: few query tokens through a kernel written here, everything longer as sdpa.

Decoding reads every key and value once, so the time to read them is the least there can be.
torch's kernel reads them once for every query head; here all heads that share them read them
together, in full vectors, in parts of a sequence side by side (`kernel.cpp`).
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
from jackfield_plugins.attention.sdpa import SdpaAttention, attend_row, torch_attention

if TYPE_CHECKING:
    import torch


class CpuDecodeAttention(Attention):
    """Prefill is torch's sdpa, decode is written here and compiled when it is first bound."""

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
        return reasons or self.available() or KERNEL.cannot_load()

    def bind(self, context: BindContext) -> BoundAttention:
        from jackfield_plugins.attention.cpu_decode.call import SHORT, Kernel
        from jackfield_plugins.attention.sdpa_flags import free_choice

        attend, _ = free_choice(on_cuda=False)
        kernel, sdpa = Kernel(), torch_attention()
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
            output = kernel.packed(query, layer, scaling)
            if layer.step.max_seqlen_q > SHORT:
                for row, span in enumerate(layer.step.spans):
                    if span.query_len > SHORT:
                        at = slice(span.query_start, span.query_start + span.query_len)
                        queries = query[at].transpose(0, 1)[None]
                        output[at] = attend_row(attend, queries, layer, row, scaling)[0]
            return output

        source = KERNEL.built_with()
        return BoundAttention(forward, sdpa.mask, packed, source=source, native=kernel.native)


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [CpuDecodeAttention()]
