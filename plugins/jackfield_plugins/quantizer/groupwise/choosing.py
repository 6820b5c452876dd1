"""Which kernel computes: the one written here, or torch's where it cannot be compiled."""

from __future__ import annotations

import functools
import logging

from jackfield_plugins.quantizer.groupwise.native import (
    INT8_KERNEL,
    KERNEL,
    Int8Product,
    NativeProduct,
)
from jackfield_plugins.quantizer.groupwise.quantize import Product
from jackfield_plugins.quantizer.groupwise.torch_kernel import TorchProduct

logger = logging.getLogger("jackfield")

#: `int8` is the native one with activations of 8 bits. Those that are written here are named.
KERNELS = ("auto", "native", "torch", "int8")
NAMED = ("native", "int8")


def why_torch(kernel: str) -> list[str]:
    """Why `kernel`, one of `KERNELS`, is torch's; an empty list: it is the one written here."""
    if kernel == "torch":
        return ["as kernel=torch asks"]
    if kernel == "int8":
        return INT8_KERNEL.cannot_load()
    return KERNEL.cannot_load()


@functools.cache
def product(kernel: str) -> Product:
    """The kernel `kernel` of `KERNELS`; one for all layers. Raises PlanError where it cannot be."""
    reasons = why_torch(kernel)
    if reasons and kernel == "auto":
        logger.warning("int4-cpu runs on torch's kernel (%s)", "; ".join(reasons))
    if kernel == "int8":
        return Int8Product()
    return TorchProduct() if reasons and kernel != "native" else NativeProduct()
