"""Operators that only put numbers elsewhere: each as copies into parts of what they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Copies = Iterator[tuple[torch.Tensor, torch.Tensor]]  # a part of the output, and what goes there


def copies(
    target: str, out: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The copies that make `out` of a call of the operator `target`; None: it is another one."""
    made = _MADE.get(target)
    try:
        return None if made is None else list(made(out, *args, **kwargs))
    except RuntimeError:  # no view can be had of these strides
        return None


def _joined(out: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> Copies:
    begin = 0
    for part in parts:
        if part.shape == (0,) and out.dim() != 1:
            continue  # torch's old way of saying nothing
        end = begin + part.shape[dim]
        yield out.narrow(dim, begin, end - begin), part
        begin = end


def _stacked(out: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> Copies:
    for at, part in enumerate(parts):
        yield out.select(dim, at), part


def _repeated(
    out: torch.Tensor, x: torch.Tensor, repeats: int, dim: int | None = None, **_: Any
) -> Copies:
    if dim is None:
        x, dim = x.view(-1), 0
    dim %= x.dim()
    yield out.unflatten(dim, (x.shape[dim], repeats)), x.unsqueeze(dim + 1)


def _copied(out: torch.Tensor, _: torch.Tensor, source: torch.Tensor, *__: Any) -> Copies:
    yield out, source


def _sliced(
    out: torch.Tensor,
    x: torch.Tensor,
    source: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Copies:
    yield out, x
    yield torch.ops.aten.slice.Tensor(out, dim, start, end, step), source


_MADE: dict[str, Callable[..., Copies]] = {
    "aten.cat.default": _joined,
    "aten.copy.default": _copied,
    "aten.slice_scatter.default": _sliced,
    "aten.stack.default": _stacked,
    "aten.repeat_interleave.self_int": _repeated,
}
