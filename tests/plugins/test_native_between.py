"""Graphs of sizes that lie between others are what a trace of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, MORE_FAMILIES, build, prompts

import jackfield
from jackfield.bridge.opaque import tracing
from jackfield.errors import PlanError
from jackfield_plugins.compiler.native import compilation, kept
from jackfield_plugins.compiler.native.between import between, evidence
from jackfield_plugins.compiler.native.graph import Graph, Input, Meta, Node, Ref
from jackfield_plugins.compiler.native.tracing import trace
from jackfield_plugins.native import keeping

#: By `native`, in one layout or in both.
REFUSED = {
    "falcon-alibi", "llama4", "lfm2", "qwen3-next", "diffllama", "hrm-text", "bloom",
}  # fmt: skip
#: What differs in graphs of theirs is more than numbers that grow in a line.
TRACED = {"gemma3n"}


def traced(family: str, cache: str, *sizes: tuple[int, int]) -> dict[tuple[int, int], Graph]:
    model: Any = build(family, torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    with jackfield.load(model, cache_implementation=cache, compile="native") as engine, tracing():
        step = engine._bound.compiled._step  # type: ignore[union-attr]
        return {size: trace(step, engine.model, *size) for size in sizes}


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES} - REFUSED))
@pytest.mark.one_in(16)
def test_they_are_the_same(family: str, cache: str) -> None:
    sizes = [(1, n) if cache == "paged" else (n, 1) for n in (1, 2, 4, 8, 16, 24, 32, 40)]
    known = evidence(sizes)
    assert len(known) == 4
    try:
        graphs = traced(family, cache, *known, sizes[2], sizes[4], sizes[6])
    except PlanError:
        assert (family, cache) == ("deepseek-v3", "dynamic")
        return
    told = {size: graphs[size] for size in known}
    for size in (sizes[2], sizes[4], sizes[6]):
        found = between(told, size)
        assert (found is None) == (family in TRACED)
        assert found is None or found.dump() == graphs[size].dump()


def graph(width: int, number: Any = 0, target: str = "aten.neg.default", **more: Any) -> Graph:
    meta = Meta(torch.float32, (1, width, 4), (4 * width, 4, 1))
    nodes = [Node(target, (Ref(0), number), {"dim": [-1]}, [meta])]
    return Graph(1, width, [Input("ids", "", meta)], nodes, 1, **more)


def of(make: Any, *widths: int) -> dict[tuple[int, int], Graph]:
    return {(1, width): make(width) for width in (1, *widths)}


def rounded(number: int, of: int) -> int:
    return -(-number // of) * of


@pytest.mark.parametrize(
    "make",
    [
        lambda n: graph(n, rounded(n, 8)), lambda n: graph(n, rounded(n, 16)),
        lambda n: graph(n, 1 << (n - 1).bit_length()), lambda n: graph(n, n % 16 == 0),
        lambda n: graph(n, n // 8), lambda n: graph(n, [0] * (n % 8)),
        lambda n: graph(n, min(n, 64)), lambda n: graph(n, n * n), lambda n: graph(n, n > 100),
        lambda n: graph(n, n if n < 100 else None), lambda n: graph(n, 1 / n),
        lambda n: graph(n, [0] * n), lambda n: graph(n, Ref(n > 100)),
        lambda n: graph(n, target="aten.neg.default" if n < 100 else "aten.abs.default"),
        lambda n: graph(n, torch.float32 if n < 100 else torch.bfloat16),
        lambda n: graph(n, {str(n): 1}), lambda n: graph(n, constants={"c": torch.zeros(n)}),
    ],
)  # fmt: skip
def test_what_does_not_grow_in_a_line_is_traced(make: Any) -> None:
    assert between(of(make, 2, 37, 128), (1, 16)) is None


def test_what_grows_in_a_line_is_written_down() -> None:
    def make(n: int) -> Graph:
        return graph(n, [3 - n, 7 * n + 2, {"size": (n, 5)}, 1.5, "text", True, None])

    known = of(make, 8, 37, 128)
    assert between(known, (1, 16)).dump() == make(16).dump()  # type: ignore[union-attr]
    for outside in ((1, 4), (1, 136), (2, 16), (16, 1)):
        assert between(known, outside) is None
    assert between(of(make, 8, 128), (1, 16)) is None
    assert between(of(make, 8, 24, 64, 128), (1, 16)) is None  # multiples of 8 alone tell nothing


@pytest.mark.parametrize("most", [16, 24, 32, 64, 128, 512, 1024])
def test_what_tells_all_sizes_has_the_ends_and_an_odd_one(most: int) -> None:
    widths = [1, 2, 4, 8, *range(16, most + 1, 8)]
    for turned in (False, True):
        found = evidence([(width, 1) if turned else (1, width) for width in widths])
        first, second, last, odd = (max(size) for size in found)
        assert (first, second, last) == (1, 2, most)
        assert 2 < odd < most
        assert odd % 2
        assert odd % 3
    assert evidence([(1, 4), (1, 1), (1, 2), (1, 8)]) == []
    assert evidence([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]) == []


def test_four_sizes_are_traced_and_none_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))
    sizes: list[int] = []

    def counted(step: Any, model: Any, rows: int, width: int) -> Graph:
        sizes.append(width)
        return trace(step, model, rows, width)

    monkeypatch.setattr(compilation, "trace", counted)
    how: dict[str, Any] = {"cache_implementation": "paged", "compile": "native"}
    for most, due in ((24, [1, 2, 24, 7]), (24, []), (32, [32])):
        with jackfield.load(build("llama"), max_batch_size=most, **how) as engine:
            engine.compile_ahead()
            assert sizes == due
            sizes.clear()
            found = [one.token_ids for one in engine.generate(prompts((5, 9, 3)), max_new_tokens=4)]
        with jackfield.load(build("llama"), cache_implementation="paged", compile="none") as engine:
            plain = engine.generate(prompts((5, 9, 3)), max_new_tokens=4)
            assert found == [one.token_ids for one in plain]
