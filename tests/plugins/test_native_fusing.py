"""Chains: the same bits as operators one by one, in fewer calls, and nothing in between is kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build

import jackfield
from jackfield.bridge.opaque import tracing
from jackfield.contracts import NativeOffers
from jackfield_plugins.compiler.native import kept, program
from jackfield_plugins.compiler.native.chains import FUSED
from jackfield_plugins.compiler.native.entering import operator
from jackfield_plugins.compiler.native.fusing import fused
from jackfield_plugins.compiler.native.graph import Graph, Input, Node, Ref, meta_of
from jackfield_plugins.compiler.native.program import Program
from jackfield_plugins.compiler.native.siblings import joined
from jackfield_plugins.native import keeping


@pytest.fixture(autouse=True)
def _own_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And the usual threads afterwards."""
    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


SEEDS = 20
UNARY = ("neg", "abs", "exp", "sigmoid", "silu", "tanh", "relu", "rsqrt", "square", "clone")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Written:
    """A graph of operators, and what torch makes of each of its values."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.values = list(tensors)
        names = [f"w{at}" for at in range(len(tensors))]
        self.inputs = [Input("weight", n, meta_of(t)) for n, t in zip(names, tensors, strict=True)]
        self.nodes: list[Node] = []
        self.weights = dict(zip(names, tensors, strict=True))

    def add(self, name: str, *args: Any, **kwargs: Any) -> None:
        """One more node, where shapes and dtypes go together."""

        def read(one: Any) -> Any:
            if isinstance(one, list):
                return [read(each) for each in one]
            return self.values[one.at] if isinstance(one, Ref) else one

        try:
            made = operator(f"aten.{name}")(*map(read, args), **kwargs)
        except (RuntimeError, IndexError):
            return
        if 0 < made.numel() <= 1 << 18:
            self.values.append(made)
            self.nodes.append(Node(f"aten.{name}", args, kwargs, meta_of(made)))

    def graph(self, output: int) -> Graph:
        """What makes the value of node `output`."""
        nodes = self.nodes[: output + 1]
        return Graph(1, 1, self.inputs, nodes, len(self.inputs) + output)


def drawn(seed: int) -> Written:
    """24 operators on rows of a random number and width, of few or all of them."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    outer = chance.choice([(1, 1), (8, 1), (3, 5), (2, 3, 4), (700,), (1, 37)])
    width = chance.choice([2, 6, 64, 600, 1300])
    shapes = [(*(1,) * len(outer), width), (*outer, width), (*outer, 1), (*outer[:-1], 1, width)]
    shapes += [(*outer, width // 2), (width,)]
    tensors = [torch.randn(shape).to(chance.choice(DTYPES)) for shape in shapes]
    tensors.append(torch.randn(*outer[::-1], width).transpose(0, len(outer) - 1))
    tensors.append(torch.randn(width).to(chance.choice(DTYPES)).expand(*outer, width))
    tensors.append(torch.randn(*outer, 1).expand(*outer, width))
    tensors.append(torch.randn(*outer, 2 * width + 3)[..., 3::2])
    graph = Written(*tensors)
    while len(graph.nodes) < 24:
        grow(graph, chance)
    return graph


def grow(graph: Written, chance: random.Random) -> None:
    """One more node, more often than not of what was made last."""

    def some() -> int:
        count = len(graph.values)
        return chance.randrange(max(0, count - chance.choice((2, 6, 40))), count)

    at = some()
    x = graph.values[at]
    fold = chance.choice(("mean.dim", "sum.dim_IntList", "amax.default"))
    half = max(2, x.shape[-1] // 2)
    dtype = {"dtype": chance.choice((*DTYPES, torch.bool))}
    forms: list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] = [
        (8, f"{chance.choice(UNARY)}.default", (Ref(at),), {}),
        (9, chance.choice(BINARY), (Ref(at), Ref(some())), {}),
        (
            3,
            f"{chance.choice(('add', 'mul', 'lt'))}.Scalar",
            (Ref(at), chance.choice((3, 0.5))),
            {},
        ),
        (3, "_to_copy.default", (Ref(at),), dtype),
        (4, fold, (Ref(at), [-1], True), {}),
        (2, "cat.default", ([Ref(at), Ref(some()), Ref(at)], -1), {}),
        (1, "slice.Tensor", (Ref(at), x.dim() - 1, 1, half), {}),
        (1, "pow.Tensor_Scalar", (Ref(at), chance.choice((2, 3.0))), {}),
    ]
    (_, name, args, kwargs), *_ = chance.choices(forms, [form[0] for form in forms])
    graph.add(name, *args, **kwargs)


IDS = torch.zeros(1, 1, dtype=torch.int64)


def program_of(graph: Graph, written: Written) -> Program:
    return Program(graph, written.weights.__getitem__, NativeOffers())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for the bits of what is no number."""
    if one.is_floating_point():
        numbers = ~one.isnan()
        if not torch.equal(numbers, ~other.isnan()):
            return False
        one, other = (t[numbers].view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def test_chains_give_the_bits_of_operators_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = fewer = 0
    for seed in range(SEEDS):
        written = drawn(seed)
        for output in range(8, len(written.nodes), 5):
            graph = written.graph(output)
            torch.set_num_threads(output % 3 + 1)
            made = program_of(graph, written)
            with monkeypatch.context() as patch:
                patch.setattr(program, "fused", lambda graph, _: graph)
                single = program_of(graph, written)
            if not single.python:  # torch adds up in another order
                assert same_bits(made(IDS, IDS, None), single(IDS, IDS, None)), (seed, output)
                compared += 1
                fewer += len(made._calls) < len(single._calls)
    assert fewer > compared // 2 > SEEDS // 2


def test_each_row_is_written_where_all_are_the_same() -> None:
    """What is made of one row that stands for many is computed once, and belongs in each."""
    x = torch.randn(600).expand(40, 600)
    one = Written(x)
    one.add("silu.default", Ref(0))
    one.add("mean.dim", Ref(1), [-1], True)
    one.add("mul.Tensor", Ref(1), Ref(2))
    one.add("clone.default", Ref(3))
    made = program_of(one.graph(3), one)
    made._places._memory.fill_(77)
    found = made(IDS, IDS, None)
    assert torch.equal(found, found[:1].expand(40, 600))
    assert torch.allclose(found, one.values[4])


def test_a_norm_is_one_call() -> None:
    """With the sum before it, which is read elsewhere too."""
    x, y, weight = torch.randn(2, 1, 96), torch.randn(2, 1, 96), torch.randn(96)
    norm = Written(x.bfloat16(), y.bfloat16(), weight.bfloat16())
    norm.add("add.Tensor", Ref(0), Ref(1))
    norm.add("_to_copy.default", Ref(3), dtype=torch.float32)
    norm.add("pow.Tensor_Scalar", Ref(4), 2)
    norm.add("mean.dim", Ref(5), [-1], True)
    norm.add("add.Scalar", Ref(6), 1e-6)
    norm.add("rsqrt.default", Ref(7))
    norm.add("mul.Tensor", Ref(4), Ref(8))
    norm.add("_to_copy.default", Ref(9), dtype=torch.bfloat16)
    norm.add("mul.Tensor", Ref(2), Ref(10))
    assert [node.target for node in fused(norm.graph(8), ()).nodes] == [FUSED]
    made = program_of(norm.graph(8), norm)
    assert torch.equal(made(IDS, IDS, None), norm.values[11])
    assert made.num_bytes == 2 * 96 * 2  # nothing but what comes out


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"falcon-alibi"}))
@pytest.mark.one_in(8)
def test_steps_of_a_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_steps(family, torch.float32, monkeypatch)


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_steps_in_16_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_steps(family, torch.bfloat16, monkeypatch)


def compare_steps(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several rows, and of several tokens of one: fewer calls, and the same logits."""
    model = build(family, dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    counts: list[int] = []
    found: list[list[Any]] = []

    def counting(calls: list[Any]) -> list[Any]:
        counts[-1] += len(calls)
        return joined(calls)

    monkeypatch.setattr(program, "joined", counting)
    for fuse in (fused, lambda graph, _: graph):
        monkeypatch.setattr(program, "fused", fuse)
        counts.append(0)
        with jackfield.load(model, compile="native", cache_implementation="paged") as engine:
            forward = engine._bound.compiled
            assert forward is not None
            with tracing():
                forward.compilation.ahead(forward._step, [(1, 3), (1, 16)])
            texts = [[5, 6, 7], [8, 9, 3, 11, 12], [4, 4, 4]]
            done = engine.generate(texts, max_new_tokens=4, output_logits=True)
            found.append([torch.as_tensor(one.logits) for one in done])
    assert all(map(same_bits, *found))
    assert counts[0] < counts[1]
