"""What does not go with a model whose prompt an encoder reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.bridge.encoders import has_encoder
from jackfield.errors import UsageError

if TYPE_CHECKING:
    from jackfield.bridge.source import ModelSource
    from jackfield.planning.spec import PlanSpec

#: arguments -> why they do not go with one
_WITHOUT = {
    "adapter": "adapters are put on decoders only",
    "merge_adapter": "adapters are put on decoders only",
    "adapters": "adapters are put on decoders only",
    "assistant_model": "its decoder takes no token back",
    "deterministic": "what was read is padded to the longest for the decoder",
    "tp_plan": "decoders only are shared among processes",
    "tp_size": "decoders only are shared among processes",
    "verify": "the model is computed again from a decoder's tokens alone",
}


def check_goes_with(source: ModelSource, spec: PlanSpec) -> None:
    """Raise UsageError for an argument that asks of an encoder-decoder model what it has not."""
    if not has_encoder(source.config):
        return
    for name, why in _WITHOUT.items():
        if getattr(spec, name, None):
            raise UsageError(
                f"{name} does not go with the encoder-decoder model {source.config.model_type!r}: "
                f"{why}; drop it"
            )
