"""Products of one value, e.g. of queries, keys and values: put side by side, and run as one call.

A product of few rows reads its weights and little else, so threads that start and wait together
once for all of them lose less than those that do so for each. Nothing else changes: each product
reads its own weights where they lie, and gives the same bits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jackfield.contracts import NativeCall
from jackfield_plugins.compiler.native.calls import Call, Done
from jackfield_plugins.compiler.native.graph import Graph, Meta, refs, renumbered
from jackfield_plugins.compiler.native.linears import address

LINEARS = frozenset({"aten.linear.default", "aten.addmm.default"})
_SEVERAL = struct.Struct("@3q")  # `struct Several` in kernel.cpp


def side_by_side(graph: Graph, targets: Container[str]) -> tuple[Graph, frozenset[int]]:
    """The same graph, in which siblings follow one another; the values that come behind a sibling.

    Siblings are nodes of one of `targets` that read the same value of the step, and weights. Each
    can run where the first of them does. One that nobody reads stays where it is: its place in
    memory may be another's at once.
    """
    first, families = len(graph.inputs), _families(graph, targets)
    order: list[int] = []
    for at in range(len(graph.nodes)):
        order += families.get(at, [])
    numbers = {old + first: new + first for new, old in enumerate(order)}
    nodes = [renumbered(graph.nodes[at], numbers) for at in order]
    behind = (at for family in families.values() for at in family[1:])
    output = numbers.get(graph.output, graph.output)
    return replace(graph, nodes=nodes, output=output), frozenset(
        numbers[at + first] for at in behind
    )


def _families(graph: Graph, targets: Container[str]) -> dict[int, list[int]]:
    """By the first of them, the nodes that belong together; most are alone."""
    first = len(graph.inputs)
    wanted = {at for node in graph.nodes for at in (*refs(node.args), *refs(node.kwargs))}
    wanted.add(graph.output)
    heads: dict[tuple[str, int], int] = {}
    families: dict[int, list[int]] = {}
    for at, node in enumerate(graph.nodes):
        head = at
        made = {ref for ref in (*refs(node.args), *refs(node.kwargs)) if ref >= first}
        alike = node.target in targets and isinstance(node.out, Meta) and at + first in wanted
        if alike and len(made) == 1:
            head = heads.setdefault((node.target, made.pop()), at)
        families.setdefault(head, []).append(at)
    return families


def joined(calls: Sequence[Call]) -> list[Call]:
    """The same calls, siblings as one where they can run together."""
    return [_together(family) if len(family) > 1 else family[0] for family in _runs(calls)]


def _runs(calls: Sequence[Call]) -> Iterator[list[Any]]:
    family: list[Call] = []
    for call in calls:
        before = family[-1] if family else None
        if not (
            isinstance(call, Done)
            and isinstance(before, Done)
            and call.sibling
            and call.call.together
            and call.call.together == before.call.together
        ):
            if family:
                yield family
            family = []
        family.append(call)
    if family:
        yield family


def _together(family: Sequence[Done]) -> Done:
    held = [ctypes.create_string_buffer(c.call.arguments, len(c.call.arguments)) for c in family]
    where = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    whole = _SEVERAL.pack(family[0].call.together, ctypes.addressof(where), len(held))
    keeps = (held, where, [one.call.keeps for one in family])
    return Done(family[0].name, NativeCall(address("several"), whole, keeps))
