"""``eager``: the attention written in the model's own code. Runs everywhere; the reference."""

from __future__ import annotations

from jackfield import hookimpl
from jackfield.contracts import (
    FEATURES,
    Attention,
    AttentionCapabilities,
    BindContext,
    ModelAttention,
)


class EagerAttention(Attention):
    """The model's own attention. It has whatever its model has, so it declares every feature."""

    name = "eager"
    auto_rank = 0
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}),
        features=frozenset(FEATURES),
        batch_invariant=True,
        materializes_scores=True,
    )

    def bind(self, context: BindContext) -> ModelAttention:
        return ModelAttention("eager")


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [EagerAttention()]
