"""Operators of native steps beside torch's: what the kernel makes of a call, and what is due."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from jackfield_plugins.compiler.native.calls import Stretch
from jackfield_plugins.compiler.native.entering import operator
from jackfield_plugins.compiler.native.linears import KERNEL
from jackfield_plugins.compiler.native.operators import native_calls

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: how far off a result may be, of its largest number, by dtype: some roundings of it
BOUNDS = {
    torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-9,
}  # fmt: skip


def run(target: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the kernel makes of it, and what torch does."""
    due = operator(target)(*args, **kwargs)
    out = blank(due)
    calls = native_calls(target, args, kwargs, out)
    assert calls is not None, f"{target} has no native form"
    stretch_of([(target, call) for call in calls])()
    return out, due


def blank(due: Any) -> Any:
    """Numbers that nobody computed, in the place of one tensor or of several."""
    if not isinstance(due, torch.Tensor):
        return [blank(one) for one in due]
    return torch.empty_strided(due.shape, due.stride(), dtype=due.dtype).fill_(77)


def stretch_of(calls: Any) -> Stretch:
    """The calls, (name, NativeCall), to be run one after the other."""
    run = KERNEL.library()["run"]
    run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    stretch = Stretch(run)
    for name, call in calls:
        stretch.add(name, call)
    stretch.close()
    return stretch


def same(target: str, *args: Any, bound: float = 1, **kwargs: Any) -> None:
    found, due = run(target, *args, **kwargs)
    if not due.dtype.is_floating_point:
        assert torch.equal(found, due), target
        return
    assert torch.equal(found.isnan(), due.isnan()), target
    found, due = found.double().nan_to_num(), due.double().nan_to_num()
    finite = due[due.abs() < 1e300]
    most = finite.abs().max().item() if finite.numel() else 0.0
    off = (found - due).abs()[due.abs() < 1e300]
    most_off = bound * BOUNDS[_coarsest(args)] * max(most, 1e-3)
    assert not off.numel() or off.max() <= most_off, (target, off.max(), most, args)
    assert torch.equal(found[due.abs() >= 1e300], due[due.abs() >= 1e300]), target


def _coarsest(args: Any) -> torch.dtype:
    dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in BOUNDS]
    return max(dtypes or [torch.float32], key=BOUNDS.__getitem__)
