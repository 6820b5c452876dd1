"""The product as one operator of torch, which a compiler sees and does not look into."""

from __future__ import annotations

import torch

from jackfield.contracts import NativeCall
from jackfield_plugins.native.arguments import unreadable
from jackfield_plugins.quantizer.int4_cpu.quantize import Quantized

_SCHEMA = (
    "int4_cpu_linear(Tensor hidden, Tensor qweight, Tensor scales, Tensor? bias, str kernel, "
    "int in_features, int out_features, int group_size, int bits) -> Tensor"
)


def _run(
    hidden: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    *sizes: int,
) -> torch.Tensor:
    from jackfield_plugins.quantizer.int4_cpu.kernels import product

    inner, outer, group, bits = sizes
    packed = Quantized(qweight, scales)
    return product(kernel).linear(hidden, packed, bias, (inner, outer, group, bits))


def _shape(
    hidden: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    *sizes: int,
) -> torch.Tensor:
    """An output for tracing, which needs its shape only; all must be where `hidden` is."""
    given = {"qweight": qweight, "scales": scales, "bias": bias}
    if any(tensor is not None and tensor.device != hidden.device for tensor in given.values()):
        raise unreadable("int4-cpu", "tensors on one device", hidden=hidden, **given)
    return hidden.new_empty(*hidden.shape[:-1], sizes[1])


def native(
    out: torch.Tensor,
    hidden: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    *sizes: int,
) -> NativeCall | None:
    """The operator as a function in C; torch's own kernel is none."""
    from jackfield_plugins.quantizer.int4_cpu.kernels import product
    from jackfield_plugins.quantizer.int4_cpu.native import NativeProduct

    made = product(kernel)
    if not isinstance(made, NativeProduct):
        return None
    inner, outer, group, bits = sizes
    return made.native(out, hidden, Quantized(qweight, scales), bias, (inner, outer, group, bits))


_library = torch.library.Library("jackfield", "FRAGMENT")  # what it defines is gone with it
_library.define(_SCHEMA)
_library.impl("int4_cpu_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("jackfield::int4_cpu_linear", _shape, lib=_library)

#: `product(kernel).linear` of what it is given; bfloat16 in and out.
int4_cpu_linear = torch.ops.jackfield.int4_cpu_linear.default
