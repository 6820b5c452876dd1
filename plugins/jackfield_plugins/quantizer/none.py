"""``none``: weights as the checkpoint has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, Quantizer, QuantizerCapabilities, Requirements
from jackfield.contracts.quantizing import method, plain_bytes

if TYPE_CHECKING:
    from torch import nn


class NoQuantizer(Quantizer):
    """Weights in the dtype of the model, or in the one that was asked for."""

    name = "none"
    auto_rank = 0
    capabilities = QuantizerCapabilities(
        offload=True,
        adapters=True,
        merges=True,
        batch_invariant=True,
        compiles=True,
        tensor_parallel=True,
        relative_error=0.0,
    )

    def rank(self, requirements: Requirements) -> int | None:
        return self.auto_rank

    def impossible(self, requirements: Requirements) -> list[str]:
        return []

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        if requirements.stored is None:
            return []
        stored = method(requirements.stored)
        return [f"the checkpoint is quantized with {stored}, and is never loaded as if it were not"]

    def weight_bytes(self, requirements: Requirements, options: Any) -> int | None:
        return plain_bytes(requirements)

    def make_config(self, context: BindContext) -> None:
        return None

    def converted(self, module: nn.Module) -> bool:
        return False


@hookimpl
def jackfield_quantizer() -> list[Quantizer]:
    return [NoQuantizer()]
