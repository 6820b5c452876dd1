"""The option `activations` of quantizers whose kernels are written here."""

from __future__ import annotations

from typing import Any, Literal

#: `dtype`: as they are; `int8`: what enters a linear layer is rounded to 8 bits, 32 that share a
#: scale, as llama.cpp's Q8_0 rounds it.
Activations = Literal["dtype", "int8"]

#: How far a layer's outputs are off by that, as a share of their size.
INT8_ERROR = 0.01


def rounds(options: Any) -> bool:
    """Whether `options` ask for activations of 8 bits."""
    return getattr(options, "activations", None) == "int8"
