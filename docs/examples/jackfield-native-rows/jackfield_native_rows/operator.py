"""`linear`: an operator of torch that is compiled C++, and the same function as a native call."""

from __future__ import annotations

import ctypes
import importlib.util
import struct

import torch

from jackfield.contracts import NativeCall

NAME = "jackfield_native_rows"


def _library() -> ctypes.CDLL:
    """What `pip install` compiled: a library with C functions, which Python does not import."""
    found = importlib.util.find_spec(f"{NAME}._linear")
    assert found is not None
    assert found.origin is not None
    library = ctypes.CDLL(found.origin)
    library.native_rows_linear.argtypes = [ctypes.c_char_p]
    library.native_rows_linear.restype = ctypes.c_bool
    return library


_COMPILED = _library()
_ADDRESS = ctypes.cast(_COMPILED.native_rows_linear, ctypes.c_void_p).value or 0


def _arguments(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> bytes:
    """`struct Arguments` of linear.cpp. `x` may have any number of dimensions."""
    outputs, inputs = weight.shape
    return struct.pack(
        "=9q",
        x.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.dtype == torch.bfloat16,
        x.numel() // inputs,
        inputs,
        outputs,
    )


def _linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    _COMPILED.native_rows_linear(_arguments(out, x, weight, scale, bias))
    return out


# --8<-- [start:native]
def native(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,  # as in the schema: what equals a default is left out
) -> NativeCall | None:
    """Asked once for the step's own tensors; the call reads and writes them in place."""
    tensors = [one for one in (out, x, weight, scale, bias) if one is not None]
    if not all(one.is_contiguous() for one in tensors):
        return None  # then the operator is called from Python
    arguments = _arguments(out, x, weight, scale, bias)
    return NativeCall(_ADDRESS, arguments, keeps=(_COMPILED, *tensors), by_row=True)


# --8<-- [end:native]
# An operator, so that a compiler of steps can put it into a graph without looking inside.
_OPERATORS = torch.library.Library(NAME, "DEF")
_OPERATORS.define("linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor")
_OPERATORS.impl("linear", _linear, "CPU")


@torch.library.register_fake(f"{NAME}::linear")
def _shape(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    del scale, bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


#: x `[..., in]`, int8 weight `[out, in]`, float32 scale `[out, 1]`, bias `[out]` in the dtype of x
#: to `[..., out]`, a new tensor; float32 or bfloat16, on the CPU.
linear = torch.ops.jackfield_native_rows.linear.default
