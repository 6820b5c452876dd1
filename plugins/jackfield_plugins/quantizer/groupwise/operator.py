"""The product as one operator of torch, which a compiler sees and does not look into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.contracts import NativeCall
from jackfield_plugins.native.operators import check_device, operator
from jackfield_plugins.quantizer.groupwise.quantize import Quantized, name_of

if TYPE_CHECKING:
    import torch

NAME = "jackfield.groupwise_linear.default"


def _run(
    hidden: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: str,
    *sizes: int,
) -> torch.Tensor:
    from jackfield_plugins.quantizer.groupwise.choosing import product

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
    check_device(name_of(sizes[3]), hidden=hidden, qweight=qweight, scales=scales, bias=bias)
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
    from jackfield_plugins.quantizer.groupwise.choosing import product
    from jackfield_plugins.quantizer.groupwise.native import NativeProduct

    made = product(kernel)
    if not isinstance(made, NativeProduct):
        return None
    inner, outer, group, bits = sizes
    return made.native(out, hidden, Quantized(qweight, scales), bias, (inner, outer, group, bits))


#: `product(kernel).linear` of what it is given; `hidden` and the result are of one dtype.
groupwise_linear = operator(
    "groupwise_linear(Tensor hidden, Tensor qweight, Tensor scales, Tensor? bias, str kernel, "
    "int in_features, int out_features, int group_size, int bits) -> Tensor",
    _run,
    _shape,
)
