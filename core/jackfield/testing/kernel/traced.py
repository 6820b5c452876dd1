"""What a compiler traces of a kernel, and the functions in C that it may run instead."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import nn

from jackfield.bridge.native_calls import operator_of
from jackfield.contracts.compiling import TRACING
from jackfield.errors import first_line, quoted
from jackfield.testing.checks import WrongError
from jackfield.testing.kernel.layers import Layer
from jackfield.testing.kernel.numbers import Rows
from jackfield.testing.native import (
    Heard,
    agree_together,
    agrees,
    keeps_nothing,
    runs_beside_itself,
)
from jackfield.testing.subject import Subject

SHAPES = ((1, 1), (1, 3), (33, 1), (16, 1), (1, 97))
LONG = (1, 97)


class _Alone(nn.Module):
    """One layer with the kernel in its place, for torch.export."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer.module
        self._fused = layer.fused

    def forward(self, rows: torch.Tensor) -> Any:
        return self._fused(rows)


def checked(subject: Subject, layers: Seq[Layer], seed: int) -> str:
    """Trace each layer, and hold the graph and native calls to the function. Raises WrongError."""
    offered = subject.backend.native_operators()
    if not isinstance(offered, Mapping):
        raise WrongError(f"native_operators must return a dict, got {quoted(offered)}")
    held = 0
    calls: dict[str, list[Any]] = {}  # of all layers, with one input
    for layer in layers[:2]:
        for shape in SHAPES:
            rows = Rows(shape).made(layer, seed)
            _traced(layer, rows)
            with Heard(offered) as heard, torch.inference_mode():
                layer.fused(rows)
            for name, args, kwargs, due in heard.calls:
                native, run = offered[name], operator_of(name)
                held += agrees(name, native, due, *args, **kwargs)
                if shape == LONG:
                    with torch.inference_mode():
                        keeps_nothing(name, native, run, args, kwargs)
                        runs_beside_itself(name, native, run, args, kwargs)
                    calls.setdefault(name, []).append((args, kwargs))
    with torch.inference_mode():
        for name, alike in calls.items():
            held += agree_together(name, offered[name], alike, operator_of(name))
    if offered and not held:
        raise WrongError(
            f"native_operators offers {', '.join(sorted(offered))}, and its functions call none of "
            "them while torch.compiler.is_compiling()"
        )
    return f"{held} native calls" if offered else "traced"


def _traced(layer: Layer, rows: torch.Tensor) -> None:
    """Hold a graph of the function, run on other rows than it was traced with, to it."""
    others = rows.flip(-1).contiguous()
    try:
        with TRACING, torch.no_grad():
            graph = torch.export.export(_Alone(layer), (rows.clone(),), strict=False).module()
            found = graph(others)
    except Exception as error:
        raise WrongError(f"it cannot be traced: {first_line(error)}") from error
    with torch.inference_mode():
        due = layer.fused(others)
    off = float((found.double() - due.double()).abs().max())
    most = max(float(due.double().abs().max()), 1e-6)
    if not off <= 16 * torch.finfo(due.dtype).eps * most:
        raise WrongError(
            f"what a compiler traces of it is {off:.3g} off what it computes, of up to {most:.3g}"
        )
