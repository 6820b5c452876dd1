"""The option `activations` of quantizers whose kernels are written here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jackfield.contracts import Requirements

#: `dtype`: as they are; `int8`: what enters a linear layer is rounded to 8 bits, 32 that share a
#: scale, as llama.cpp's Q8_0 rounds it.
Activations = Literal["dtype", "int8"]

#: How far a layer's outputs are off by that, as a share of their size.
INT8_ERROR = 0.01


def refuse_of_live(requirements: Requirements, options: Any) -> list[str]:
    """Why activations cannot be chosen: a model that is there already computes as it was loaded."""
    asked = getattr(options, "activations", None)
    if asked is None or not requirements.live:
        return []
    return [f"takes activations={asked} when weights are read, not of a live model; leave it out"]


def rounds(options: Any) -> bool:
    """Whether `options` ask for activations of 8 bits."""
    return getattr(options, "activations", None) == "int8"
