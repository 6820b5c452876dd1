"""``triton``: attention over pages, written here, with a kernel for prefill and one for decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    PackedLayer,
    Requirements,
)
from jackfield_plugins.devices import capabilities
from jackfield_plugins.interpreting import interpreting, without_triton

if TYPE_CHECKING:
    import torch

LARGEST_HEAD = 512
OLDEST_GPU = (8, 0)  # the first with matrix units for bfloat16


@dataclass(frozen=True)
class TritonOptions:
    """`num_splits`: into how many parts decode splits each sequence's keys.

    None chooses it for each step from the lengths and the number of multiprocessors, so that the
    last bits of a result depend on what else is in the batch; a number makes them independent.
    """

    num_splits: int | None = None

    def __post_init__(self) -> None:
        if self.num_splits is not None and not 1 <= self.num_splits <= 64:
            raise ValueError(f"num_splits must be from 1 to 64, not {self.num_splits}")


class TritonAttention(Attention):
    """Any head size up to 512, any page size; the methods are cited in `kernels.py`."""

    name = "triton"
    options = TritonOptions
    capabilities = AttentionCapabilities(
        layouts=frozenset({"packed"}),
        devices=frozenset({"cuda", "cpu"}),
        features=frozenset(
            {
                "bidirectional_blocks",
                "grouped_query",
                "mixed_head_sizes",
                "sinks",
                "sliding_window",
                "softcap",
            }
        ),
        recordable=True,
    )

    def rank(self, requirements: Requirements) -> int | None:
        """On a GPU before `sdpa`, which takes a call for each sequence."""
        packed = requirements.layout == "packed" and requirements.device == "cuda"
        return 50 if packed else None

    def available(self) -> list[str]:
        return without_triton()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        largest = max(requirements.head_dims, default=0)
        if largest > LARGEST_HEAD:
            reasons.append(f"has no tiles for head size {largest} (at most {LARGEST_HEAD})")
        if not interpreting():
            reasons += _refuse_natively(requirements)
        return reasons

    def bind(self, context: BindContext) -> BoundAttention:
        from functools import partial

        from jackfield_plugins.attention.triton.launch import PagedAttention, kernels_in_use
        from jackfield_plugins.attention.triton.warming import compile_ahead

        attend = PagedAttention(context.options.num_splits)

        def packed(
            module: torch.nn.Module,
            query: torch.Tensor,
            layer: PackedLayer,
            scaling: float | None = None,
            softcap: float | None = None,
            s_aux: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            return attend(
                query,
                layer,
                scaling=query.shape[2] ** -0.5 if scaling is None else scaling,
                softcap=softcap,
                sinks=s_aux,
            )

        warm = partial(compile_ahead, attend, context)
        return BoundAttention(_not_padded, _not_padded, packed, kernels_in_use(), warm)


def _refuse_natively(requirements: Requirements) -> list[str]:
    """What the interpreter can do and a GPU cannot."""
    if requirements.device == "cpu":
        return ["runs on a CPU only under TRITON_INTERPRET=1, set before Python starts"]
    reasons = []
    if requirements.dtype == "float64":
        reasons.append(
            "runs float64 only under TRITON_INTERPRET=1; load the model in another dtype"
        )
    if (oldest := min(capabilities(requirements), default=OLDEST_GPU)) < OLDEST_GPU:
        here = ".".join(map(str, oldest))
        reasons.append(f"needs a GPU of compute capability 8.0 or later, not {here}")
    return reasons


def _not_padded(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("the attention 'triton' serves the packed layout only")


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [TritonAttention()]
