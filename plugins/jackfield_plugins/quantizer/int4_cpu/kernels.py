"""Which kernel computes: the one written here, or torch's where it cannot be compiled."""

from __future__ import annotations

import functools
import logging

from jackfield_plugins.quantizer.int4_cpu.linear import Product
from jackfield_plugins.quantizer.int4_cpu.native import KERNEL, NativeProduct
from jackfield_plugins.quantizer.int4_cpu.torch_kernel import TorchProduct

logger = logging.getLogger("jackfield")

KERNELS = ("auto", "native", "torch")


@functools.cache
def product(kernel: str) -> Product:
    """The kernel `kernel` of `KERNELS`; one for all layers. Raises PlanError where it cannot be."""
    if kernel == "torch":
        return TorchProduct()
    if kernel == "auto" and (reasons := KERNEL.cannot_build() or KERNEL.cannot_load()):
        logger.warning("int4-cpu runs on torch's kernel: its own %s", "; ".join(reasons))
        return TorchProduct()
    return NativeProduct()
