"""Products of one value run as one call: the same bits, in fewer calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build
from native_calls import FLOATS, stretch_of

import jackfield
from jackfield_plugins.compiler.native import program
from jackfield_plugins.compiler.native.calls import Done
from jackfield_plugins.compiler.native.compilation import NativeCompilation
from jackfield_plugins.compiler.native.entering import entered, operator
from jackfield_plugins.compiler.native.graph import Graph, Input, Meta, Node, Ref, refs
from jackfield_plugins.compiler.native.linears import FEW_TURNED, few
from jackfield_plugins.compiler.native.operators import native_calls
from jackfield_plugins.compiler.native.siblings import LINEARS, joined, side_by_side


@pytest.fixture
def threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


def products(dtype: torch.dtype, rows: int, turned: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Of one value with several weights, some with a bias."""
    x, made = (torch.randn(rows, 200) / 14).to(dtype), []
    for at, outer in enumerate((300, 2, 17, 640, 64)):
        weight, bias = torch.randn(outer, 200).to(dtype), torch.randn(outer).to(dtype)
        if turned:
            made.append(("aten.addmm.default", (bias, x, weight.t().contiguous())))
        else:
            made.append(("aten.linear.default", (x, weight, *[bias] * (at % 2))))
    return made


def calls_of(made: list[tuple[str, tuple[Any, ...]]], outs: list[torch.Tensor]) -> list[Done]:
    calls = []
    for at, ((target, args), out) in enumerate(zip(made, outs, strict=True)):
        (call,) = native_calls(target, args, {}, out) or ()
        calls.append(Done(target, call, sibling=at > 0))
    return calls


def run(calls: list[Any]) -> None:
    stretch_of([(call.name, call.call) for call in calls])()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["linear", "addmm"])
def test_together_they_give_the_same_bits(dtype: torch.dtype, turned: bool, threads: None) -> None:
    for rows in (1, 3, FEW_TURNED) if turned else (1, 3, 8, 32, few(dtype)):
        for count in (1, 3):
            torch.set_num_threads(count)
            made = products(dtype, rows, turned)
            dues = [torch.full_like(operator(t)(*a), 7) for t, a in made]
            outs = [torch.full_like(due, 77) for due in dues]
            run(calls_of(made, dues))
            together = joined(calls_of(made, outs))
            assert len(together) == 1
            run(together)
            assert all(map(torch.equal, outs, dues))


META = Meta(torch.float32, (1, 4), (4, 1))


def random_graph(chance: random.Random) -> Graph:
    inputs = [Input("ids", "", META), *[Input("weight", f"w{i}", META) for i in range(4)]]
    nodes: list[Node] = []
    for at in range(len(inputs), len(inputs) + 30):
        x = Ref(0 if not nodes else chance.randrange(max(len(inputs), at - 8), at))
        if chance.random() < 0.6:
            nodes.append(Node("aten.linear.default", (x, Ref(chance.randint(1, 4))), {}, META))
        else:
            y = Ref(chance.randrange(0, at))
            nodes.append(Node("aten.add.Tensor", (x, y), {}, META))
    return Graph(1, 1, inputs, nodes, len(inputs) + len(nodes) - 1)


def meaning(graph: Graph) -> list[Any]:
    """Each value as what it is made of."""
    values: list[Any] = [one.name or one.kind for one in graph.inputs]
    for node in graph.nodes:
        values.append((node.target, *(values[arg.at] for arg in node.args)))
    return values


def test_nodes_that_are_moved_mean_the_same() -> None:
    chance, families = random.Random(3), 0
    for _ in range(60):
        graph = random_graph(chance)
        moved, behind = side_by_side(graph, LINEARS)
        before, after = meaning(graph), meaning(moved)
        assert sorted(map(str, before)) == sorted(map(str, after))
        assert str(before[graph.output]) == str(after[moved.output])
        first = len(graph.inputs)
        for value in behind:  # a sibling reads what the one before it reads, and nothing newer
            one, other = moved.nodes[value - first], moved.nodes[value - first - 1]
            assert one.target == other.target == "aten.linear.default"
            assert one.args[0] == other.args[0]
        read = {ref for node in moved.nodes for ref in refs(node.args)} | {moved.output}
        assert behind <= read  # what nobody reads may lie where another lies
        families += len(behind)
    assert families > 100


def test_a_step_takes_fewer_calls_and_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries, keys and values are one call, and so are the two halves of a gated layer."""
    found, calls = {}, {}
    counts: list[int] = []

    def counting(given: list[Any]) -> list[Any]:
        made = joined(given)
        counts.append(len(made))
        return made

    monkeypatch.setattr(program, "joined", counting)
    monkeypatch.setattr(
        NativeCompilation, "reads", lambda *_: False
    )  # the prompt is no native step
    for targets in (frozenset(), LINEARS):
        monkeypatch.setattr(program, "LINEARS", targets)
        with jackfield.load(
            build("llama", torch.float32), compile="native", cache_implementation="paged"
        ) as engine:
            (done,) = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=1)
            assert len(engine._bound.compiled.compilation._programs) == len(counts) == 1
            found[bool(targets)], calls[bool(targets)] = done.logprobs, counts.pop()
    assert found[True] == found[False]
    assert calls[False] - calls[True] == 2 * 3  # of each layer


def test_weights_of_several_kinds_stay_apart() -> None:
    """What one call cannot read is another's."""
    x = torch.randn(2, 64)
    square = torch.randn(64, 64)
    made = [
        ("aten.linear.default", (x, square)),
        ("aten.linear.default", (x, torch.randn(64, 64).t())),
        ("aten.linear.default", (x, square)),
    ]
    outs = [torch.empty(2, 64) for _ in made]
    together = joined(calls_of(made, outs))
    assert len(together) == 3
    run(together)
    for out, (target, args) in zip(outs, made, strict=True):
        torch.testing.assert_close(out, operator(target)(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_many_rows_are_torchs_and_not_copied(dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, 40, 16).to(dtype), torch.randn(24, 16).to(dtype)
    bias = torch.randn(24).to(dtype)
    for target, args in (
        ("aten.linear.default", (x, weight)),
        ("aten.linear.default", (x, weight, bias)),
        ("aten.linear.default", (x[0], weight, bias)),
        ("aten.linear.default", (x.transpose(0, 1), weight, bias)),
        ("aten.addmm.default", (bias, x[0], weight.t())),
    ):
        due = operator(target)(*args)
        out = torch.full_like(due, 77)
        entered(target, args, {}, out)()
        assert torch.equal(out, due), target
