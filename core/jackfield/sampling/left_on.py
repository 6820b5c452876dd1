"""What code that a request brought along leaves on in a thread that other requests share.

torch keeps modes (`FakeTensorMode`, `torch.device("meta")`), gradients and autocast for each
thread, and whoever comes next in it would run with them. The default dtype and the like are the
process's, which other threads change as well while they load a model; they are not looked at.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch._C import (
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

#: What is held against an inference mode that a stranger's object keeps on.
_held: list[Any] = []


class Surroundings(NamedTuple):
    """What torch does for this thread, whoever calls it. Taken in about a microsecond."""

    functions: tuple[Any, ...]
    dispatches: tuple[Any, ...]
    device: Any
    inference: bool
    grad: bool
    autocast: bool
    threads: int


def surroundings() -> Surroundings:
    functions, dispatches = _len_torch_function_stack(), _len_torch_dispatch_stack()
    return Surroundings(
        tuple(map(_get_function_stack_at, range(functions))) if functions else (),
        tuple(map(_get_dispatch_stack_at, range(dispatches))) if dispatches else (),
        vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        _is_any_autocast_enabled(),
        torch.get_num_threads(),
    )


def left_on(before: Surroundings) -> str | None:
    """Put back what is not as it was, and say what that is; None: all is as it was."""
    now = surroundings()
    return None if now == before else ", ".join(_put_back(before, now))


def _put_back(before: Surroundings, now: Surroundings) -> list[str]:
    found = []
    for mode in reversed([m for m in now.dispatches if m not in before.dispatches]):
        found.append(type(mode).__name__)
        _leave(mode, TorchDispatchMode, lambda: surroundings().dispatches)
    for mode in reversed([m for m in now.functions if m not in before.functions]):
        device = getattr(mode, "device", None)
        found.append(type(mode).__name__ if device is None else f"the default device {device}")
        _leave(mode, TorchFunctionMode, lambda: surroundings().functions)
    for mode in before.functions:
        if mode not in surroundings().functions:
            found.append(f"no {type(mode).__name__}")
            mode.__enter__()
    torch._GLOBAL_DEVICE_CONTEXT.device_context = before.device
    if now.autocast and not before.autocast:
        found.append("torch.autocast")
        _end_autocast()
    if torch.is_inference_mode_enabled() != before.inference:
        found.append(f"torch.inference_mode({now.inference})")
        _held.append(torch._C._InferenceMode(before.inference))
        _held[-1].__enter__()
    if now.grad != before.grad:
        found.append(f"torch.set_grad_enabled({now.grad})")
    torch.set_grad_enabled(before.grad)
    if now.threads != before.threads:
        found.append(f"torch.set_num_threads({now.threads})")
        torch.set_num_threads(before.threads)
    return found


def _leave(mode: Any, kind: Any, stack: Any) -> None:
    """Leave a mode as it wants to be left, and then for certain."""
    with contextlib.suppress(BaseException):
        mode.__exit__(None, None, None)
    if mode in stack():
        kind.__exit__(mode, None, None, None)


def _end_autocast() -> None:
    for device in _AUTOCAST:
        torch.set_autocast_enabled(device, False)
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
