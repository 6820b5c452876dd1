"""Each operator that native steps compute without torch, against torch, for odd shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_calls import BOUNDS, FLOATS, blank, run, same, stretch_of

from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.native.entering import entered, operator
from jackfield_plugins.compiler.native.graph import Graph, Input, Meta, Node, Ref
from jackfield_plugins.compiler.native.joining import copies
from jackfield_plugins.compiler.native.linears import FEW_TURNED, few
from jackfield_plugins.compiler.native.memory import Places, num_bytes
from jackfield_plugins.compiler.native.operators import native_calls


def shaped(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of many sizes, in some order of the dimensions, sometimes a slice of more."""
    order = list(range(len(shape)))
    chance.shuffle(order)
    wide = [shape[d] + chance.choice([0, 0, 1, 3]) for d in order]
    made = torch.randn(wide, dtype=torch.float64) * 2.0 ** chance.randint(-3, 3)
    back = made.permute([order.index(d) for d in range(len(shape))])
    return back[tuple(slice(0, n) for n in shape)].to(dtype)


def shapes(chance: random.Random) -> tuple[int, ...]:
    sizes = [1, 2, 3, 5, 16, 17, 33, 64, 130, 513, 600]
    return tuple(chance.choice(sizes[: 11 - 2 * d]) for d in reversed(range(chance.randint(1, 4))))


UNARY = (
    "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid",
    "silu", "relu", "floor", "erf", "gelu",
)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_operators_of_one_number(name: str, dtype: torch.dtype) -> None:
    chance = random.Random(name)
    for _ in range(6):
        x = shaped(chance, dtype, shapes(chance))
        same(f"aten.{name}.default", x.abs() + 0.1 if name in ("log", "sqrt", "rsqrt") else x)
    edges = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 90.0, -90.0, 700.0, -700.0], dtype=torch.float64)
    ends = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    if name not in ("sin", "cos"):
        some = edges if name == "gelu" else torch.cat([edges, ends])  # torch's gelu of inf is nan
        same(f"aten.{name}.default", some.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_numbers_are_the_same_on_any_threads(dtype: torch.dtype) -> None:
    """Parts of a row, rows, and what is broadcast to them."""
    usual = torch.get_num_threads()
    x, row = torch.randn(33, 4099).to(dtype), torch.randn(4099).to(dtype)
    column, whole = x[:, :1].clone(), torch.randint(-9, 9, x.shape)
    given: list[tuple[str, tuple[Any, ...]]] = [
        ("aten.silu.default", (x,)),
        ("aten.neg.default", (x.flatten()[1:],)),
        ("aten.mul.Tensor", (x, row)),
        ("aten.add.Tensor", (x.t(), column.t().expand(4099, 33))),
        ("aten.div.Tensor", (x[:, ::2], column)),
        ("aten.mul.Tensor", (whole, whole)),
        ("aten._to_copy.default", (x[:, 1:],)),
    ]
    try:
        for target, args in given:
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                found.append(run(target, *args)[0])
            assert all(torch.equal(found[0], other) for other in found[1:]), target
    finally:
        torch.set_num_threads(usual)


def test_small_numbers_keep_their_digits() -> None:
    """Where a formula would subtract numbers that are nearly the same."""
    x = torch.logspace(-12, 1, 500)
    for name in ("tanh", "sigmoid", "silu", "erf", "exp"):
        for signed in (x, -x):
            found, _ = run(f"aten.{name}.default", signed)
            due = getattr(torch.ops.aten, name)(signed.double())  # torch's own has fewer, on ARM
            assert ((found - due).abs() <= 4e-7 * due.abs()).all(), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu_as_a_tanh(dtype: torch.dtype) -> None:
    same("aten.gelu.default", torch.randn(3, 700).to(dtype), approximate="tanh")


BINARY = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_operators_of_two_tensors_that_broadcast(name: str, dtype: torch.dtype) -> None:
    chance = random.Random(name)
    for _ in range(8):
        shape = shapes(chance)
        x = shaped(chance, dtype, shape)
        narrow = tuple(n if chance.random() < 0.6 else 1 for n in shape)
        other = chance.choice([dtype, torch.float32])
        y = shaped(chance, other, narrow[chance.randint(0, len(shape) - 1) :])
        same(f"aten.{name}.Tensor", x, y)
        same(f"aten.{name}.Scalar", x, 0.5)
    if name in ("add", "sub"):
        same(f"aten.{name}.Tensor", x, x * 2, alpha=3, bound=2)  # torch rounds some products first


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_number_is_rounded_before_it_is_compared(name: str, dtype: torch.dtype) -> None:
    for number in (0.1, 0.3, 1 / 3, -0.7, 2):
        same(f"aten.{name}.Scalar", torch.tensor([number, 0.5], dtype=dtype), number)


def test_what_is_finer_than_the_rows_is_left_to_torch() -> None:
    x, fine = torch.randn(3, 7), {"dtype": torch.float64}
    for target, args, kwargs in (
        ("aten.softmax.int", (x, -1, torch.float64), {}),
        ("aten.sum.dim_IntList", (x, [-1]), fine),
        ("aten.mean.dim", (x, [-1]), fine),
        ("aten.sum.dim_IntList", (torch.tensor(3.0), [-1]), {}),
        ("aten.le.Tensor", (x.bfloat16(), torch.tensor(0.1)), {}),
    ):
        out = torch.empty_like(operator(target)(*args, **kwargs))
        assert native_calls(target, args, kwargs, out) is None, target


def test_whole_numbers() -> None:
    x, y = torch.randint(-9, 9, (4, 5)), torch.randint(-9, 9, (5,))
    for name in ("add", "sub", "mul", "eq", "lt", "ge"):
        same(f"aten.{name}.Tensor", x, y)
    large = torch.tensor([2**40 + 1, 2**24 + 1, -(2**31)])
    same("aten.add.Tensor", large, 1)
    same("aten._to_copy.default", large, dtype=torch.float64)
    for dtype in (torch.float32, torch.bool, torch.int32):
        same("aten._to_copy.default", x, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_choices_and_bounds(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33).to(dtype)
    same("aten.where.self", x > 0, x, -x)
    same("aten.masked_fill.Scalar", x, x > 0, float("-inf"))
    same("aten.clamp.default", x, -0.5, 0.5)
    same("aten.clamp.default", x, min=0.1)
    same("aten.clamp_min.default", x, 0.1)
    same("aten.clamp_max.default", x, 0.1)
    same("aten.clamp.default", x, 0.5, -0.5)
    for low, high in ((math.nan, 0.5), (0.5, math.nan), (math.nan, math.nan)):
        assert not holds("aten.clamp.default", x, low, high)
    same("aten.maximum.default", x, -x)
    same("aten.minimum.default", x, -x)
    same("aten.logical_and.default", x > 0, x < 1)
    same("aten.logical_not.default", x > 0)
    for power in (2, 3, 0.5, -0.5, 1):
        same("aten.pow.Tensor_Scalar", x.abs() + 0.1, power, bound=4)
    same("aten.rsub.Scalar", x, 1.0)
    same("aten.softplus.default", x * 20)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("into", FLOATS, ids=str)
def test_casts_round_as_torch_does(source: torch.dtype, into: torch.dtype) -> None:
    x = torch.cat([torch.randn(2000, dtype=torch.float64) * 2.0**e for e in range(-30, 20, 3)])
    found, due = run("aten._to_copy.default", x.to(source), dtype=into)
    if not (source is torch.float64 and into in (torch.bfloat16, torch.float16)):
        assert torch.equal(found, due)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_operators_on_rows(dtype: torch.dtype) -> None:
    for size in (1, 5, 16, 31, 64, 257):
        x = torch.randn(3, 4, size).to(dtype)
        for one in (x, x.transpose(0, 1), torch.randn(3, 4, size + 3).to(dtype)[..., :size]):
            same("aten.mean.dim", one, [-1], True, bound=4)
            same("aten.sum.dim_IntList", one, [-1], bound=8)
            same("aten.amax.default", one, [-1], True)
            same("aten._softmax.default", one, -1, False)
            weight, bias = (torch.randn(size).to(dtype) for _ in "wb")
            if size > 1:
                same("aten.layer_norm.default", one, [size], weight, bias, 1e-5, bound=8)
                same("aten.layer_norm.default", one.contiguous(), [size], bound=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_linears(dtype: torch.dtype, threads: int) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for inner, outer in ((1, 1), (3, 5), (16, 16), (33, 17), (64, 100), (200, 33), (515, 40)):
            for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 32, few(dtype)):
                x = (torch.randn(1, rows, inner) / inner**0.5).to(dtype)
                weight, bias = torch.randn(outer, inner).to(dtype), torch.randn(outer).to(dtype)
                same("aten.linear.default", x, weight, bound=4)
                same("aten.linear.default", x, weight, bias, bound=4)
                if rows <= FEW_TURNED:
                    same("aten.addmm.default", bias, x[0], weight.t().contiguous(), bound=4)
        wide = torch.randn(40, 100).to(dtype)[:, :64]  # rows lie apart
        same("aten.linear.default", torch.randn(2, 64).to(dtype), wide, bound=4)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """Up to the number of rows beyond which torch computes them, and with any threads."""
    usual = torch.get_num_threads()
    for inner in (67, 1024, 1056, 3000):
        most, bias = few(dtype), torch.randn(50).to(dtype)
        x = (torch.randn(most, inner) / inner**0.5).to(dtype)
        weight = torch.randn(50, inner).to(dtype)
        for other, up_to in ((weight, most), (weight.t().contiguous().t(), FEW_TURNED)):
            torch.set_num_threads(1)
            alone = torch.cat([product(x[row : row + 1], other, bias) for row in range(up_to)])
            for rows in (
                n for n in (*range(2, 34), 37, 47, 61, 64, 65, 81, 112, 127, most) if n <= up_to
            ):
                torch.set_num_threads(1 + rows % 3)
                assert torch.equal(product(x[:rows], other, bias), alone[:rows]), rows
    torch.set_num_threads(usual)


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors like `x` that lie otherwise, that repeat a number, or that have none."""
    yield x
    for dim in range(x.dim()):
        wide = torch.stack([x, x + 1], dim + 1).flatten(dim, dim + 1)
        yield wide[(slice(None),) * dim + (slice(None, None, 2),)]  # every second of more
        yield x.transpose(0, dim).contiguous().transpose(0, dim)
        yield x.narrow(dim, 0, 1).expand_as(x)  # one for all
        yield (one := x.narrow(dim, 0, 1))
        for any_at_all in (0, 1, 7, 5000):  # the stride of a dimension with one place
            strides = [any_at_all if d == dim else s for d, s in enumerate(one.stride())]
            yield one.as_strided(one.shape, strides, one.storage_offset())
        yield x.narrow(dim, 0, 0)


def read(dtype: torch.dtype) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of the operators that read memory by sizes and strides."""
    x, w = torch.randn(3, 20).to(dtype), torch.randn(7, 20).to(dtype)
    row, square, index = torch.randn(7).to(dtype), w[:3, :3].clone(), torch.tensor([2, 0, 1])
    made: dict[str, list[tuple[Any, ...]]] = {
        "aten.linear.default": [(x, w), (x, w, row), (x[0], w, row)],
        "aten.addmm.default": [(row, x, w.t())],
        "aten.mm.default": [(x, w.t())],
        "aten.matmul.default": [(x.unflatten(1, (2, 10)), torch.randn(3, 10, 5).to(dtype))],
        "aten.embedding.default": [(w, torch.tensor([[6, 0], [3, 3]]))],
        "aten.index_select.default": [(w, 0, index)],
        "aten.index.Tensor": [(w, [index])],
        "aten.layer_norm.default": [(x[:, :7], [7], row, row + 1)],
        "aten.gather.default": [(square, 1, index[:, None])],
        "aten.scatter.value": [(square, 1, index[:, None], 2.0)],
        "aten.index_put.default": [(w, [index], x)],
        "aten.topk.default": [(x, 2)],
        "aten.cumsum.default": [(index, 0)],
        "aten.sort.default": [(index, 0), (index, 0, True)],
        "aten.where.self": [(x > 0, x, x + 1)],
        "aten.add.Tensor": [(x, x[0])],
    }
    for name in ("mean.dim", "sum.dim_IntList", "amax.default"):
        made[f"aten.{name}"] = [(x, [1], True), (x, [0])]
    return made


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("target", read(torch.float32))
def test_tensors_that_lie_in_any_way(target: str, dtype: torch.dtype) -> None:
    """Each operator with each argument so: what the kernel would read wrongly is torch's."""
    computed = 0
    for args in read(dtype)[target]:
        for at, own in enumerate(args):
            for one in layouts(own) if isinstance(own, torch.Tensor) else ():
                changed = (*args[:at], one, *args[at + 1 :])
                try:
                    operator(target)(*changed)
                except (RuntimeError, IndexError):
                    continue  # not for torch, either
                computed += holds(target, *changed)
    assert computed


def holds(target: str, *args: Any, **kwargs: Any) -> bool:
    """Whether the kernel has it; it gives what torch does, and so does what stands in for it."""
    due = operator(target)(*args, **kwargs)
    out, other = blank(due), blank(due)
    calls = native_calls(target, args, kwargs, out)
    stretch_of([(target, call) for call in calls or ()])()
    entered(target, args, kwargs, other)()
    bound = 8 * BOUNDS.get(args[0].dtype, 0)
    for found in (other,) if calls is None else (out, other):
        for one, exact in zip(listed(found), listed(due), strict=True):
            where = target, [(a.shape, a.stride()) for a in args if isinstance(a, torch.Tensor)]
            assert torch.allclose(one, exact, bound, bound, equal_nan=True), where
    return calls is not None


def listed(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def test_keywords_are_heeded() -> None:
    x = torch.randint(-9, 9, (3, 7))
    assert holds("aten.sort.default", x, descending=False)
    assert not holds("aten.sort.default", x, descending=True)
    fine = torch.randn(3, 700) * 5
    assert not holds("aten.sum.dim_IntList", fine, [-1], dtype=torch.bfloat16)
    assert not holds("aten.softmax.int", fine, -1, torch.bfloat16)
    assert holds("aten.softmax.int", fine.bfloat16(), -1, torch.float32)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), 77, dtype=x.dtype)
    calls = native_calls("aten.linear.default", (x, weight, bias), {}, out)
    stretch_of([("aten.linear.default", call) for call in calls or ()])()
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_small_products(dtype: torch.dtype) -> None:
    left, right = torch.randn(2, 3, 16, 1).to(dtype), torch.randn(2, 3, 1, 5).to(dtype)
    same("aten.matmul.default", left, right)
    same(
        "aten.bmm.default", torch.randn(4, 3, 7).to(dtype), torch.randn(4, 7, 5).to(dtype), bound=8
    )
    same("aten.mm.default", torch.randn(3, 7).to(dtype), torch.randn(5, 7).to(dtype).t(), bound=8)


def test_rows_of_a_table() -> None:
    table = torch.randn(9, 5).bfloat16()
    for index in (torch.tensor([[1, 8], [0, 3]]), torch.tensor([-1, -9])):
        if (index >= 0).all():
            same("aten.embedding.default", table, index)
        same("aten.index.Tensor", table, [index])
    same("aten.index_select.default", table, 0, torch.tensor([1, 1, 8]))
    same("aten.embedding.default", torch.randn(8, 1).t(), torch.tensor([0, 0]))  # strides 1 and 1


@pytest.mark.parametrize("index", [9, -10, 10**9])
def test_an_index_that_leads_out_of_a_table_is_told(index: int) -> None:
    out, table = torch.zeros(1, 5), torch.randn(9, 5)
    calls = native_calls("aten.embedding.default", (table, torch.tensor([index])), {}, out)
    stretch = stretch_of([("aten.embedding.default", call) for call in calls or ()])
    with pytest.raises(ExecutionError, match=r"aten\.embedding\.default cannot compute"):
        stretch()
    assert not out.any()


def test_what_the_kernel_does_not_have_is_left_to_torch() -> None:
    x = torch.randn(3, 4)
    for target, args in (
        ("aten.cumsum.default", (x, 0)),
        ("aten.mean.dim", (x.t(), [0])),
        ("aten.linear.default", (torch.randn(few(torch.float32) + 1, 4), x)),  # many rows
        (
            "aten.addmm.default",
            (torch.randn(3), torch.randn(FEW_TURNED + 1, 4), x.t().contiguous()),
        ),
        ("aten.add.Tensor", (x.to(torch.complex64), 1)),
    ):
        due = operator(target)(*args)
        out = torch.empty_like(due) if isinstance(due, torch.Tensor) else due
        assert native_calls(target, args, {}, out) is None, target


def test_values_that_live_at_one_time_lie_apart() -> None:
    """Random graphs: nothing is overwritten that is read later."""
    chance = random.Random(5)
    for _ in range(40):
        nodes: list[Node] = []
        for at in range(1, 30):
            reads = [Ref(chance.randrange(max(0, at - 6), at)) for _ in range(2)]
            shape = (chance.choice([1, 7, 64, 300]),)
            meta = Meta(torch.float32, shape, (1,))
            if at > 1 and chance.random() < 0.3:
                node = Node("aten.unsqueeze.default", (reads[0], 0), {}, meta)
            else:
                node = Node("aten.add.Tensor", tuple(reads), {}, meta)
            nodes.append(node)
        graph = Graph(
            1, 1, [Input("ids", "", Meta(torch.int64, (1, 1), (1, 1)))], nodes, len(nodes)
        )
        _hold_apart(graph)


def _hold_apart(graph: Graph) -> None:
    places = Places(graph)
    owner, until = {0: 0}, {}
    for at, node in enumerate(graph.nodes, 1):
        view = node.target == "aten.unsqueeze.default"
        owner[at] = owner[node.args[0].at] if view else at
        for ref in node.args:
            if isinstance(ref, Ref):
                until[owner[ref.at]] = at
    until[owner[graph.output]] = len(graph.nodes) + 1
    spans = {}
    for value, begin in owner.items():
        if value and value == begin:
            place = places.of(value, graph.nodes[value - 1].out)
            first = place.data_ptr()
            spans[value] = (first, first + num_bytes(graph.nodes[value - 1].out))
    for a, (first, last) in spans.items():
        for b, (begin, end) in spans.items():
            if a < b <= until.get(a, a):
                assert last <= begin or end <= first, (a, b)


JOINS = {
    "aten.cat.default": [
        lambda x: ([x, 2 * x], 1),
        lambda x: ([x, x[:, :1]], -2),
        lambda x: ([x.transpose(0, 1)] * 2,),
    ],
    "aten.stack.default": [
        lambda x: ([x, 2 * x],),
        lambda x: ([x, x + 1], -1),
        lambda x: ([x.transpose(0, 2)], 1),
    ],
    "aten.repeat_interleave.self_int": [
        lambda x: (x, 2, 1),
        lambda x: (x, 3, -1),
        lambda x: (x.transpose(1, 2), 2, 0),
        lambda x: (x, 2),
    ],
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("target", JOINS)
def test_operators_that_only_put_numbers_elsewhere(target: str, dtype: torch.dtype) -> None:
    for call in JOINS[target]:
        args = call(torch.arange(24).reshape(2, 3, 4).to(dtype))
        due = operator(target)(*args)
        out = torch.empty_strided(due.shape, due.stride(), dtype=dtype).fill_(77)
        parts = copies(target, out, args, {})
        assert parts is not None
        for place, one in parts:
            calls = native_calls("aten._to_copy.default", [one], {}, place)
            stretch_of([(target, call) for call in calls or ()])()
        assert torch.equal(out, due)


def test_what_no_view_can_be_had_of_is_left_to_torch() -> None:
    x = torch.zeros(3, 4).t()
    assert copies("aten.repeat_interleave.self_int", torch.zeros(24), (x, 2), {}) is None
