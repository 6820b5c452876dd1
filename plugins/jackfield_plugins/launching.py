"""Kernels of Triton: compiled once, and then launched without asking what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from jackfield_plugins.devices import on

#: Bytes; kernels are compiled for addresses that are multiples of it.
ALIGNMENT = 16

#: `run(grid, *arguments)`: tensors where kernels are interpreted, addresses of them where compiled.
Run = Callable[..., None]


#: The first GPUs on which a kernel can begin while the one before it still runs.
_OVERLAPPING = (9, 0)


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel runs on a GPU; decided when it was defined, not when it is called."""
    return isinstance(kernel, triton.runtime.JITFunction)


def ready(kernel: Any, types: Mapping[str, Any], fixed: Mapping[str, Any], **options: int) -> Run:
    """`kernel`, compiled here and now for the current device.

    `types` has what stands for each argument that differs from call to call, `fixed` the constants
    that are compiled in. Tensors among the arguments stand for addresses that are multiples of
    `ALIGNMENT` unless the kernel says that it does not look.
    """
    if not is_compiled(kernel):
        return lambda grid, *given: kernel[grid](*given, **fixed, **options)
    given = [types[name] for name in kernel.arg_names if name not in fixed]
    compiled = kernel.warmup(*given, grid=(1,), **fixed, **options)
    tail = tuple(fixed[name] for name in kernel.arg_names if name in fixed)

    def run(grid: tuple[int, int, int], *given: Any) -> None:
        compiled[grid](*given, *tail)

    return run


def overlapping(
    kernel: Any,
    types: Mapping[str, Any],
    fixed: Mapping[str, Any],
    device: torch.device,
    **options: int,
) -> Run:
    """`kernel`, compiled for `device`; in recordings it begins while the one before still runs.

    Its constant `EARLY` says whether it does, and has to wait for that by itself then. What it
    reads before it waits are weights, which nobody writes in a recording; one by one, kernels begin
    when all before is done. (CUDA: programmatic dependent launch.)
    """
    with on(device):
        alone = ready(kernel, types, {**fixed, "EARLY": False}, **options)
        if device.type != "cuda" or torch.version.hip is not None:
            return alone
        if torch.cuda.get_device_capability(device) < _OVERLAPPING:
            return alone
        beside = ready(kernel, types, {**fixed, "EARLY": True}, launch_pdl=True, **options)

    def run(grid: tuple[int, int, int], *given: Any) -> None:
        (beside if torch.cuda.is_current_stream_capturing() else alone)(grid, *given)

    return run


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a kernel that is compiled can read `tensor` where it lies."""
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it that lies where a kernel can read it."""
    return tensor if is_aligned(tensor) else tensor.clone()


def as_arguments(kernel: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """What a `Run` of `kernel` takes for `tensors`, which must live until it was launched."""
    return tuple(t.data_ptr() for t in tensors) if is_compiled(kernel) else tensors


def launch(run: Callable[..., None], device: torch.device, *given: Any) -> None:
    """`run(*given)`, whose tensors are on `device`: Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        run(*given)
    else:
        with on(device):
            run(*given)
