"""Graphs of sizes that lie between others are what a trace of them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, build

import jackfield
from jackfield.bridge.opaque import tracing
from jackfield_plugins.compiler.native.between import between, in_order
from jackfield_plugins.compiler.native.graph import Graph, Input, Meta, Node, Ref
from jackfield_plugins.compiler.native.tracing import trace


def traced(family: str, cache: str, *sizes: tuple[int, int]) -> dict[tuple[int, int], Graph]:
    model: Any = build(family, torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with jackfield.load(model, cache_implementation=cache, compile="native") as engine, tracing():
        step = engine._bound.compiled._step  # type: ignore[union-attr]
        return {size: trace(step, engine.model, *size) for size in sizes}


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"falcon-alibi"}))
@pytest.mark.one_in(8)
def test_they_are_the_same(family: str, cache: str) -> None:
    numbers = (1, 2, 5, 8, 24, 40)
    sizes = [(1, n) if cache == "paged" else (n, 1) for n in numbers]
    graphs = traced(family, cache, *sizes)
    ends = {size: graphs[size] for size in (sizes[1], sizes[4], sizes[5])}
    for size in sizes[2:4]:
        found = between(ends, size)
        assert found is not None
        assert found.dump() == graphs[size].dump()
    assert between(ends, sizes[0]) is None
    found = between({size: graphs[size] for size in (sizes[0], sizes[4], sizes[5])}, sizes[2])
    assert found is None or found.dump() == graphs[sizes[2]].dump()


def graph(width: int, number: Any = 0, target: str = "aten.neg.default", **more: Any) -> Graph:
    meta = Meta(torch.float32, (1, width, 4), (4 * width, 4, 1))
    nodes = [Node(target, (Ref(0), number), {"dim": [-1]}, [meta])]
    return Graph(1, width, [Input("ids", "", meta)], nodes, 1, **more)


def of(make: Any, *widths: int) -> dict[tuple[int, int], Graph]:
    return {(1, width): make(width) for width in widths}


@pytest.mark.parametrize(
    "make",
    [
        lambda n: graph(n, min(n, 64)), lambda n: graph(n, n * n), lambda n: graph(n, n > 100),
        lambda n: graph(n, n if n < 100 else None), lambda n: graph(n, 1 / n),
        lambda n: graph(n, [0] * n), lambda n: graph(n, Ref(n > 100)),
        lambda n: graph(n, target="aten.neg.default" if n < 100 else "aten.abs.default"),
        lambda n: graph(n, torch.float32 if n < 100 else torch.bfloat16),
        lambda n: graph(n, {str(n): 1}), lambda n: graph(n, constants={"c": torch.zeros(n)}),
    ],
)  # fmt: skip
def test_what_does_not_grow_in_a_line_is_traced(make: Any) -> None:
    assert between(of(make, 8, 24, 128), (1, 16)) is None


def test_what_grows_in_a_line_is_written_down() -> None:
    def make(n: int) -> Graph:
        return graph(n, [3 - n // 8, 7 * n + 2, {"size": (n, 5)}, 1.5, "text", True, None])

    known = of(make, 8, 24, 128)
    assert between(known, (1, 16)).dump() == make(16).dump()  # type: ignore[union-attr]
    assert between(known, (1, 20)) is None  # half of an eighth is no whole number
    for outside in ((1, 4), (1, 136), (2, 16), (16, 1)):
        assert between(known, outside) is None
    assert between(of(make, 8, 128), (1, 16)) is None


def test_the_ends_come_first() -> None:
    widths = [1, 2, 4, 8, 16, 24, 32]
    found = in_order([(1, width) for width in widths])
    assert sorted(found) == [(1, width) for width in widths]
    assert found[:4] == [(1, 1), (1, 2), (1, 32), (1, 8)]
    assert in_order([(1, 4), (1, 1)]) == [(1, 1), (1, 4)]
