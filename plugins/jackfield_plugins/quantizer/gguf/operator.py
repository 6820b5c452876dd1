"""Products and rows as operators of torch, which a compiler sees and does not look into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield_plugins.native.operators import check_device, operator
from jackfield_plugins.quantizer.gguf import native
from jackfield_plugins.quantizer.gguf.native import Matrix

if TYPE_CHECKING:
    import torch


def _linear(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    in_features: int,
    int8: bool,
) -> torch.Tensor:
    return native.linear(hidden, packed, bias, Matrix(kind, out_features, in_features), int8)


def _linear_shape(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    in_features: int,
    int8: bool,
) -> torch.Tensor:
    check_device("gguf", hidden=hidden, packed=packed, bias=bias)
    return hidden.new_empty(*hidden.shape[:-1], out_features)


def _rows(
    index: torch.Tensor,
    packed: torch.Tensor,
    kind: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return native.rows(index, packed, Matrix(kind, out_features, in_features), dtype)


def _rows_shape(
    index: torch.Tensor,
    packed: torch.Tensor,
    kind: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    check_device("gguf", index=index, packed=packed)
    return index.new_empty(*index.shape, in_features, dtype=dtype)


#: `native.linear` and `native.rows` of what they are given.
gguf_linear = operator(
    "gguf_linear(Tensor hidden, Tensor packed, Tensor? bias, str kind, int out_features, "
    "int in_features, bool int8) -> Tensor",
    _linear,
    _linear_shape,
)
gguf_rows = operator(
    "gguf_rows(Tensor index, Tensor packed, str kind, int out_features, int in_features, "
    "ScalarType dtype) -> Tensor",
    _rows,
    _rows_shape,
)
