"""Calls of a kernel as operators of torch, which a compiler sees and does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jackfield_plugins.native.arguments import unreadable

_library = torch.library.Library("jackfield", "FRAGMENT")  # what it defines is gone with it


def operator(
    schema: str, run: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]
) -> Any:
    """Define what `schema` says in `torch.ops.jackfield`; tracing needs its `shape` alone."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jackfield::{name}", shape, lib=_library)
    return getattr(torch.ops.jackfield, name).default


def check_device(kernel: str, **given: torch.Tensor | None) -> None:
    """Raise ExecutionError where tensors are not all on the device of the first."""
    devices = {tensor.device for tensor in given.values() if tensor is not None}
    if len(devices) > 1:
        raise unreadable(kernel, "tensors on one device", **given)
