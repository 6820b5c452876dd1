"""What routers and experts of mixtures are made of, without Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import build, prompts
from native_calls import FLOATS, blank, run, same, stretch_of

import jackfield
from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.native.operators import native_calls

EXPERTS = "transformers.grouped_mm_fallback.default"


def scores(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Many of them equal, some no numbers."""
    rows, size = chance.randint(1, 9), chance.choice([1, 2, 4, 8, 60, 128, 256])
    x = torch.randint(0, max(2, size // 3), (rows, size)).to(dtype) / 8
    if chance.random() < 0.3:
        x[0, chance.randrange(size)] = float("nan")
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_are_those_that_torch_finds(dtype: torch.dtype) -> None:
    """Among equals, too: another expert would give other tokens."""
    chance, compared = random.Random(7), 0
    for _ in range(200):
        x = scores(chance, dtype)
        k = chance.randint(1, min(8, x.shape[1]))
        if native_calls("aten.topk.default", (x, k), {}, blank(x.topk(k))) is None:
            assert k * 64 <= x.shape[1]
            continue
        (values, index), due = run("aten.topk.default", x, k)
        assert torch.equal(index, due[1])
        assert torch.equal(values.nan_to_num(-1), due[0].nan_to_num(-1))
        compared += 1
    assert compared > 150


def test_whole_numbers_are_sorted() -> None:
    for size in (1, 2, 16, 300):
        x = torch.randint(0, 8, (3, size))
        (values, index), due = run("aten.sort.default", x)
        assert torch.equal(values, due[0])
        assert torch.equal(x.gather(1, index), values)
        assert torch.equal(index.sort().values, torch.arange(size).expand(3, size))


def test_parts_are_counted_and_summed() -> None:
    for experts in (2, 3, 8, 60, 257):
        x = torch.randint(0, experts, (90,)).float()
        same("aten.histc.default", x, bins=experts, min=0, max=experts - 1)
        same("aten.histc.default", x[:0], bins=experts, min=0, max=experts - 1)
    same("aten.histc.default", torch.randn(4000), 7, -2, 3)
    for dtype in (torch.float32, torch.int64, torch.int32, torch.bool):
        same("aten.cumsum.default", torch.randint(0, 9, (70,)).to(dtype), 0, dtype=torch.int32)
    same("aten.cumsum.default", torch.full((9,), 2**60), 0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_numbers_are_picked_and_put(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (5, 9)).to(dtype)
    index = torch.stack([torch.randperm(9)[:4] for _ in range(5)])
    same("aten.gather.default", x, -1, index)
    same("aten.gather.default", x[None], 2, index[None])
    same("aten.scatter.value", x, 1, index, 1)
    rows = torch.randint(0, 2, (4, 9)).to(dtype)
    same("aten.index_put.default", x, [torch.tensor([4, 0, -2, 1])], rows)
    same(
        "aten.index_put.default", x[:, 0].contiguous(), [torch.tensor([3, 1])], rows[0, :2].clone()
    )


@pytest.mark.parametrize("index", [9, -10, 10**12])
def test_an_index_that_leads_out_of_its_rows_is_told(index: int) -> None:
    x, where = torch.zeros(5, 9), torch.full((5, 2), index)
    for target, args in (
        ("aten.gather.default", (x, 1, where)),
        ("aten.scatter.value", (x, 1, where, 1)),
        ("aten.index_put.default", (x.t().contiguous(), [where[0]], torch.zeros(2, 5))),
    ):
        out = torch.zeros(5, 2) if "gather" in target else torch.zeros_like(args[0])
        calls = native_calls(target, args, {}, out)
        assert calls is not None
        with pytest.raises(ExecutionError, match="leads out of its table"):
            stretch_of([(target, call) for call in calls])()


def experts(sizes: list[int], dtype: torch.dtype, turned: bool) -> tuple[torch.Tensor, ...]:
    inner, outer, rows = 40, 70, sum(sizes) + 2  # the last two are nobody's
    x = (torch.randn(rows, inner) / 6).to(dtype)
    weight = torch.randn(len(sizes), outer, inner).to(dtype).transpose(1, 2)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    return x, weight.contiguous() if turned else weight, ends


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_experts_compute_their_own_rows(dtype: torch.dtype, turned: bool) -> None:
    for sizes in ([1], [0, 2, 0], [3, 0, 1, 40, 0], [0, 0]):
        same(EXPERTS, *experts(sizes, dtype, turned), bound=4)


def test_experts_that_end_before_they_begin() -> None:
    x, weight, _ = experts([2, 2], torch.float32, turned=False)
    for ends in ([3, 1], [0, 7], [-1, 2]):
        args = (x, weight, torch.tensor(ends, dtype=torch.int32))
        calls = native_calls(EXPERTS, args, {}, torch.zeros(6, 70))
        assert calls is not None
        with pytest.raises(ExecutionError):
            stretch_of([(EXPERTS, call) for call in calls])()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_are_summed_up(dtype: torch.dtype) -> None:
    for shape, dim in (((3, 2, 5), 1), ((4, 70), 0), ((2, 3, 4, 5), 1)):
        x = torch.randn(shape).to(dtype)
        for name in ("sum.dim_IntList", "mean.dim", "amax.default"):
            same(f"aten.{name}", x, [dim], bound=4)
            same(f"aten.{name}", x, [dim], True, bound=4)


def test_whole_numbers_are_divided_downwards() -> None:
    x = torch.tensor([0, 1, -1, 7, -7, 8, -8, 2**62 + 1, -(2**62) - 1, -(2**63), 2**63 - 1])
    for by in (1, 2, 3, -1, -2, 7, 2**40):
        same("aten.floor_divide.default", x, by)
    out = torch.empty(3)
    assert native_calls("aten.floor_divide.default", (torch.randn(3), 2), {}, out) is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_steps_of_a_mixture_are_one_call(family: str) -> None:
    """Also where several rows choose experts of their own."""
    model, found = build(family, torch.float32), []
    model.set_experts_implementation("grouped_mm")
    common: dict[str, Any] = {"cache_implementation": "paged"}
    for compiler in ("none", "native"):
        with jackfield.load(model, compile=compiler, **common) as engine:
            done = engine.generate(prompts((5, 9, 3)), max_new_tokens=8)
            found.append([one.token_ids for one in done])
    assert found[0] == found[1]
    with jackfield.load(model, compile="native", **common) as engine:
        engine.generate(prompts((5, 9, 3)), max_new_tokens=3)
        for program in engine._bound.compiled.compilation._programs.values():
            assert not program.python
            assert not program.attended_in_python
