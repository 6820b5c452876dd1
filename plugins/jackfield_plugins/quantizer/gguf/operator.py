"""Products and rows as operators of torch, which a compiler sees and does not look into."""

from __future__ import annotations

import torch

from jackfield_plugins.native.arguments import unreadable
from jackfield_plugins.quantizer.gguf import native
from jackfield_plugins.quantizer.gguf.native import Matrix

_LINEAR = (
    "gguf_linear(Tensor hidden, Tensor packed, Tensor? bias, str kind, int out_features, "
    "int in_features) -> Tensor"
)
_ROWS = (
    "gguf_rows(Tensor index, Tensor packed, str kind, int out_features, int in_features, "
    "ScalarType dtype) -> Tensor"
)


def _linear(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    return native.linear(hidden, packed, bias, Matrix(kind, out_features, in_features))


def _linear_shape(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    """An output for tracing, which needs its shape only; all must be where `hidden` is."""
    given = {"packed": packed, "bias": bias}
    if any(tensor is not None and tensor.device != hidden.device for tensor in given.values()):
        raise unreadable("gguf", "tensors on one device", hidden=hidden, **given)
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
    if packed.device != index.device:
        raise unreadable("gguf", "tensors on one device", index=index, packed=packed)
    return index.new_empty(*index.shape, in_features, dtype=dtype)


_library = torch.library.Library("jackfield", "FRAGMENT")  # what it defines is gone with it
_library.define(_LINEAR)
_library.define(_ROWS)
_library.impl("gguf_linear", _linear, "CompositeExplicitAutograd")
_library.impl("gguf_rows", _rows, "CompositeExplicitAutograd")
torch.library.register_fake("jackfield::gguf_linear", _linear_shape, lib=_library)
torch.library.register_fake("jackfield::gguf_rows", _rows_shape, lib=_library)

#: `native.linear` and `native.rows` of what they are given.
gguf_linear = torch.ops.jackfield.gguf_linear.default
gguf_rows = torch.ops.jackfield.gguf_rows.default
