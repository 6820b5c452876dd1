"""The graph of a step whose size lies between others: written down, where tracing takes seconds.

In the graphs of one model's steps the same operators stand in the same order; what differs are
whole numbers, each of which grows in a line with the size. Where that is so in graphs of sizes that
have nothing in common, one larger and one smaller, it is taken to be so between them. Steps are
filled up to multiples of 8, so one of these sizes is odd: what is rounded up to such a multiple, or
done for such alone, would look like a line without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jackfield_plugins.compiler.native.graph import Graph, Input, Meta, Node, Ref

Size = tuple[int, int]  # rows, tokens of a row


class _UnlikeError(Exception):
    """Something differs and is no number that grows in a line."""


def evidence(sizes: Iterable[Size]) -> list[Size]:
    """The sizes whose graphs tell those of all `sizes`; none where tracing these is no less."""
    found = sorted(set(sizes))
    along = next((at for at in (1, 0) if all(size[1 - at] == 1 for size in found)), None)
    if along is None or len(found) < 5:
        return []
    odd = int(0.29 * found[-1][along]) | 1
    odd += 2 * (odd % 3 == 0)
    # A step of one token may have other operators: views of it are others.
    return [*found[:2], found[-1], (1, odd) if along else (odd, 1)]


def between(graphs: Mapping[Size, Graph], size: Size) -> Graph | None:
    """The graph of `size`, if it follows from `graphs`; None: it has to be traced."""
    along = next((at for at in (1, 0) if size[1 - at] == 1), None)
    if along is None:
        return None
    number = size[along]
    known = {one[along]: graph for one, graph in graphs.items() if one[1 - along] == 1}
    several = sorted(one for one in known if one > 1)
    below = [one for one in several if one < number]
    above = [one for one in several if one > number]
    odd = [one for one in several if one % 2]
    if not (below and above and odd):
        return None
    at = sorted({below[0], below[-1], above[0], above[-1], odd[0]})
    if len(at) < 3 or any(known[one].constants for one in at):
        return None
    try:
        return _graph([known[one] for one in at], at, number, size)
    except _UnlikeError:
        return None


def _graph(graphs: Sequence[Graph], at: Sequence[int], number: int, size: Size) -> Graph:
    def follow(found: Sequence[Any]) -> Any:
        return _follow(found, at, number)

    return Graph(
        *size,
        inputs=[Input(*follow(same)) for same in _side_by_side([one.inputs for one in graphs])],
        nodes=[Node(*follow(same)) for same in _side_by_side([one.nodes for one in graphs])],
        output=_same([one.output for one in graphs]),
    )


def _follow(found: Sequence[Any], at: Sequence[int], number: int) -> Any:
    """What stands at `number` where `found` stand at the numbers `at`. Raises _UnlikeError."""
    first = found[0]
    kind = type(first)
    if any(type(one) is not kind for one in found):
        raise _UnlikeError
    if kind is int:
        return _in_line(found, at, number)
    if isinstance(first, Ref):
        return _same(found)
    if isinstance(first, list | tuple):
        parts = [_follow(same, at, number) for same in _side_by_side(found)]
        return kind(*parts) if kind in (Meta, Input, Node) else kind(parts)
    if isinstance(first, dict):
        names = _same([list(one) for one in found])
        return {name: _follow([one[name] for one in found], at, number) for name in names}
    return _same(found)


def _in_line(found: Sequence[int], at: Sequence[int], number: int) -> int:
    (first, *rest), (origin, *others) = found, at
    over, step = rest[0] - first, others[0] - origin
    for one, place in zip(rest, others, strict=True):
        if (one - first) * step != over * (place - origin):
            raise _UnlikeError
    grown = over * (number - origin)
    if grown % step:
        raise _UnlikeError
    return first + grown // step


def _same(found: Sequence[Any]) -> Any:
    if any(one != found[0] for one in found):
        raise _UnlikeError
    return found[0]


def _side_by_side(found: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    _same([len(one) for one in found])
    return zip(*found, strict=True)
