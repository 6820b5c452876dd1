"""The module that takes the place of a linear layer."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from jackfield.errors import ExecutionError
from jackfield_plugins.native.arguments import listed
from jackfield_plugins.native.pages import moved
from jackfield_plugins.quantizer.groupwise.operator import groupwise_linear
from jackfield_plugins.quantizer.groupwise.quantize import (
    BITS,
    DTYPES,
    GROUP_SIZES,
    Product,
    Quantized,
    name_of,
    quantize,
)
from jackfield_plugins.quantizer.on_cpu import shape_alone

WEIGHTS = ("qweight", "scales")


class GroupwiseLinear(nn.Module):
    """A linear layer of small integers with a scale a group; `dtype` in and out, float32 sums.

    Its buffers `qweight` and `scales` are in the kernel's layout, and empty until `set_weight`; the
    state dict has them in canonical form (see `quantize.py`), which fits every kernel. It computes
    no gradients.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        product: Product,
        *,
        group_size: int = 32,
        bits: int = 4,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if bits not in BITS or group_size not in GROUP_SIZES or in_features % group_size:
            raise ExecutionError(
                f"a layer has weights of {BITS} bits in groups of {GROUP_SIZES} that divide the "
                f"inputs, not {bits} bits in groups of {group_size} for {in_features} inputs"
            )
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.bits = group_size, bits
        self.product = product
        self.dtype = _allowed(dtype, bits)
        self._sizes = (in_features, out_features, group_size, bits)
        self._ready = False  # whether there is memory that a kernel may read
        self.register_buffer("qweight", torch.empty(0, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(0, dtype=torch.bfloat16))
        empty = torch.zeros(out_features, dtype=dtype) if bias else None
        self.register_buffer("bias", empty)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, product: Product, *, group_size: int = 32, bits: int = 4
    ) -> Self:
        """The layer quantized now; `linear` is left as it is."""
        new = cls(
            linear.in_features, linear.out_features, linear.bias is not None, product,
            group_size=group_size, bits=bits, dtype=linear.weight.dtype,
        )  # fmt: skip
        new.set_weight(quantize(linear.weight, bits=bits, group_size=group_size), linear.bias)
        return new

    def set_weight(self, quantized: Quantized, bias: torch.Tensor | None = None) -> None:
        """Take over a weight in canonical form; one of another shape or dtype is refused."""
        for name, found, (shape, dtype) in zip(WEIGHTS, quantized, self._expected(), strict=True):
            if found.shape != shape or found.dtype is not dtype:
                raise ExecutionError(
                    f"{name} of a layer of {self.extra_repr()} is {dtype} {list(shape)}, not "
                    f"{found.dtype} {list(found.shape)}"
                )
        self.qweight, self.scales = map(moved, self.product.pack(quantized, self.bits))
        self._ready = self.qweight.is_cpu and self.qweight.numel() > 0
        if self.bias is not None and bias is not None:
            self.bias = bias.detach().to(self.dtype, copy=True)

    @property
    def weight(self) -> torch.Tensor:
        """An empty stand-in for models that look up the dtype or the device of their layers."""
        return self.scales.new_empty(0, dtype=self.dtype)

    def quantized(self) -> Quantized:
        """The weight in canonical form, made anew."""
        packed = Quantized(self.qweight, self.scales)
        return self.product.unpack(packed, self.out_features, self.bits)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """`[..., in_features]` to `[..., out_features]`."""
        if (
            input.dtype is not self.dtype
            or input.shape[-1] != self.in_features
            or input.requires_grad
            or not input.is_cpu
            or not self._ready
        ):
            return self._without_values(input)
        if torch.compiler.is_compiling():
            return groupwise_linear(  # type: ignore[no-any-return]
                input, self.qweight, self.scales, self.bias, self.product.name, *self._sizes
            )
        buffers = self._buffers  # attribute access through nn.Module costs more than the rest
        return self.product.linear(
            input,
            (buffers["qweight"], buffers["scales"]),  # type: ignore[arg-type]
            buffers["bias"],
            self._sizes,
        )

    def _without_values(self, hidden: torch.Tensor) -> torch.Tensor:
        wrong = []
        if hidden.dtype is not self.dtype:
            own = str(self.dtype).removeprefix("torch.")
            wrong.append(f"takes {own}, not {hidden.dtype}: load with dtype='{own}'")
        if hidden.is_cpu and not self._ready and self.out_features > 0:  # a part may have none
            wrong.append("has no weights yet")
        return shape_alone(self, hidden, name_of(self.bits), wrong)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bits={self.bits}, group_size={self.group_size}, kernel={self.product.name}"
        )

    def _expected(self) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of `WEIGHTS` in canonical form."""
        return [
            ((self.out_features, self.in_features * self.bits // 8), torch.uint8),
            ((self.out_features, self.in_features // self.group_size), torch.bfloat16),
        ]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """A module can be moved and can compute in another dtype that kernels read; scales stay."""
        self.dtype, scales = _allowed(fn(self.weight).dtype, self.bits), self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype is not scales.dtype:
            self.scales = scales.to(self.scales.device)
        self._ready = self.qweight.is_cpu and self.qweight.numel() > 0
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.qweight.numel():
            destination.update(zip((prefix + n for n in WEIGHTS), self.quantized(), strict=True))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        found = [state_dict.get(prefix + name) for name in WEIGHTS]
        if all(tensor is not None for tensor in found):
            self.set_weight(Quantized(*found), state_dict.get(prefix + "bias"))  # type: ignore[arg-type]
            packed = zip((prefix + n for n in WEIGHTS), (self.qweight, self.scales), strict=True)
            state_dict = {**state_dict, **dict(packed)}  # what torch then copies onto itself
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _allowed(dtype: torch.dtype, bits: int) -> torch.dtype:
    if dtype not in DTYPES[bits]:
        raise ExecutionError(f"{name_of(bits)} computes in {listed(DTYPES[bits])}, not in {dtype}")
    return dtype
