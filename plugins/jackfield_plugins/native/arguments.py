"""What is said where a kernel cannot read what it was given.

A kernel gets addresses, and a wrong one ends the process or reads what is somebody else's. So each
call looks at device, dtype, shape and layout of its tensors first: one condition, written out in
the call, since it is paid for hundreds of times a token. Where it does not hold, this says why.
"""

from __future__ import annotations

import torch

from jackfield.errors import ExecutionError


def unreadable(kernel: str, takes: str, **given: torch.Tensor | None) -> ExecutionError:
    """The error of a call of `kernel`, which `takes` other tensors than those that were `given`."""
    told = "; ".join(f"{name}: {_told(tensor)}" for name, tensor in given.items())
    return ExecutionError(f"{kernel} cannot read what it was given: it takes {takes}; here {told}")


def listed(dtypes: tuple[torch.dtype, ...]) -> str:
    """As messages say it."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _told(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    told = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    if tensor.layout is not torch.strided:
        return f"{told}, {tensor.layout}"
    if not tensor.is_contiguous():
        return f"{told}, strides {list(tensor.stride())}"
    if tensor.is_cpu and tensor.numel() and not tensor.data_ptr():
        return f"{told}, without memory"
    return told


def is_bias(bias: torch.Tensor, out_features: int, dtype: torch.dtype) -> bool:
    """Whether a kernel of linears can read it: dense, of this size and dtype, on the CPU."""
    return (
        bias.is_cpu
        and bias.dtype is dtype
        and bias.numel() == out_features
        and bias.is_contiguous()
        and bias.data_ptr() != 0
    )
