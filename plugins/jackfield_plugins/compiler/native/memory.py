"""Where the values of a step lie: one piece of memory, used again once nobody reads it."""

from __future__ import annotations

from bisect import insort
from typing import Any

import torch

from jackfield_plugins.compiler.native.graph import Graph, Meta, refs
from jackfield_plugins.compiler.native.views import is_view, viewed

_ALIGNED = 64


class Places:
    """A tensor for each value that a node makes and that is no view of another one."""

    def __init__(self, graph: Graph) -> None:
        offsets, size = _offsets(graph)
        self._memory = torch.zeros(size + _ALIGNED, dtype=torch.uint8)
        self._begin = -self._memory.data_ptr() % _ALIGNED
        self._offsets = offsets
        self.num_bytes = size

    def of(self, value: int, out: Any) -> Any:
        """The tensors of a value, each as its `Meta` says."""
        if isinstance(out, list):
            return [self._tensor(value, part, meta) for part, meta in enumerate(out)]
        return self._tensor(value, 0, out)

    def _tensor(self, value: int, part: int, meta: Meta | None) -> torch.Tensor | None:
        if meta is None:
            return None
        begin = self._begin + self._offsets[value, part]
        memory = self._memory[begin : begin + num_bytes(meta)]
        return memory.view(meta.dtype).as_strided(meta.shape, meta.stride)


def num_bytes(meta: Meta) -> int:
    """How much memory a tensor takes, gaps included; at least that of one number."""
    last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True) if n > 0)
    return (last + 1) * meta.dtype.itemsize


def _offsets(graph: Graph) -> tuple[dict[tuple[int, int], int], int]:
    """Where each part of each value begins, and where the last one ends."""
    first = len(graph.inputs)
    owner = _owners(graph)
    until = dict.fromkeys(owner, -1)
    for at, node in enumerate(graph.nodes):
        for value in (*refs(node.args), *refs(node.kwargs)):
            until[owner.get(value, value)] = at
    until[owner.get(graph.output, graph.output)] = len(graph.nodes)
    free: list[tuple[int, int]] = []  # (bytes, offset)
    held: dict[int, list[tuple[int, int]]] = {}  # by the node after which they are free
    offsets: dict[tuple[int, int], int] = {}
    end = 0
    for at, node in enumerate(graph.nodes):
        value = first + at
        if owner[value] == value:
            parts = node.out if isinstance(node.out, list) else [node.out]
            for part, meta in enumerate(parts):
                if isinstance(meta, Meta):
                    need = -(-num_bytes(meta) // _ALIGNED) * _ALIGNED
                    offsets[value, part], room, end = _take(free, need, end)
                    after = max(until[value], at)
                    held.setdefault(after, []).append((room, offsets[value, part]))
        for room, offset in held.pop(at, []):
            insort(free, (room, offset))
    return offsets, end


def _owners(graph: Graph) -> dict[int, int]:
    """Each node's value, and the value in whose memory it lies."""
    owner: dict[int, int] = {}
    for at, node in enumerate(graph.nodes, len(graph.inputs)):
        base = viewed(node) if is_view(node) else None
        owner[at] = at if base is None else owner.get(base, base)
    return owner


def _take(free: list[tuple[int, int]], need: int, end: int) -> tuple[int, int, int]:
    """The offset and size of a free place of `need` bytes or a little more, and the new end."""
    for at, (room, offset) in enumerate(free):
        if need <= room <= 2 * need:
            del free[at]
            return offset, room, end
    return end, need, end + need
