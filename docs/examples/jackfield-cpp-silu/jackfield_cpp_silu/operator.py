"""`silu_mul`, an operator of torch that is compiled C++."""

from __future__ import annotations

import ctypes
import importlib.util

import torch

NAME = "jackfield_cpp_silu"


def _library() -> ctypes.CDLL:
    """What `pip install` compiled: a library with C functions, which Python does not import."""
    found = importlib.util.find_spec(f"{NAME}._silu")
    assert found is not None
    assert found.origin is not None
    library = ctypes.CDLL(found.origin)
    library.silu_mul.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
    library.silu_mul.restype = None
    return library


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _COMPILED.silu_mul(gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel())
    return out


_COMPILED = _library()
# An operator, so that a compiler of steps can put it into a graph without looking inside.
_OPERATORS = torch.library.Library(NAME, "DEF")
_OPERATORS.define("silu_mul(Tensor gate, Tensor up) -> Tensor")
_OPERATORS.impl("silu_mul", _silu_mul, "CPU")


@torch.library.register_fake(f"{NAME}::silu_mul")
def _shape(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


#: silu(gate) * up, float32 `[..., size]` all three, on the CPU; a new tensor. Reads both once.
silu_mul = torch.ops.jackfield_cpp_silu.silu_mul.default
