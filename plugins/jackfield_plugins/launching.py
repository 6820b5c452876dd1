"""Kernels of Triton that are compiled once, and then launched without asking what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton

#: `run(grid, *arguments)`: tensors where kernels are interpreted, addresses of them where compiled.
Run = Callable[..., None]


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel runs on a GPU; decided when it was defined, not when it is called."""
    return isinstance(kernel, triton.runtime.JITFunction)


def ready(kernel: Any, types: Mapping[str, Any], fixed: Mapping[str, Any], **options: int) -> Run:
    """`kernel`, compiled here and now for the current device.

    `types` has what stands for each argument that differs from call to call, `fixed` the constants
    that are compiled in. Tensors among the arguments stand for addresses that are multiples of 16
    unless the kernel says that it does not look.
    """
    if not is_compiled(kernel):
        return lambda grid, *given: kernel[grid](*given, **fixed, **options)
    given = [types[name] for name in kernel.arg_names if name not in fixed]
    compiled = kernel.warmup(*given, grid=(1,), **fixed, **options)
    tail = tuple(fixed[name] for name in kernel.arg_names if name in fixed)

    def run(grid: tuple[int, int, int], *given: Any) -> None:
        compiled[grid](*given, *tail)

    return run
