"""Which kernel computes: the one written here, or torch's where it cannot be compiled."""

from __future__ import annotations

import functools
import logging

from jackfield_plugins.quantizer.groupwise.linear import Product
from jackfield_plugins.quantizer.groupwise.native import KERNEL, NativeProduct
from jackfield_plugins.quantizer.groupwise.torch_kernel import TorchProduct

logger = logging.getLogger("jackfield")

KERNELS = ("auto", "native", "torch")


def why_torch(kernel: str) -> list[str]:
    """Why `kernel`, one of `KERNELS`, is torch's; an empty list: it is the one written here."""
    if kernel == "torch":
        return ["as kernel=torch asks"]
    return KERNEL.cannot_build() or KERNEL.cannot_load()


@functools.cache
def product(kernel: str) -> Product:
    """The kernel `kernel` of `KERNELS`; one for all layers. Raises PlanError where it cannot be."""
    reasons = why_torch(kernel)
    if reasons and kernel == "auto":
        logger.warning("int4-cpu runs on torch's kernel (%s)", "; ".join(reasons))
    return TorchProduct() if reasons and kernel != "native" else NativeProduct()
