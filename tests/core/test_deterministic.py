"""deterministic=True: log-probabilities with the same bits, whatever runs beside a request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from families import build, config_of, prompts
from torch.nn import functional

import jackfield
from jackfield.bridge.fixed_shapes import _FixedShapes
from jackfield.errors import ExecutionError, PlanError

BATCHES = (1, 2, 7, 44)

Bits = dict[tuple[int, ...], tuple[list[int], list[float]]]


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Three do not divide a row into whole vectors."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def bits(engine: jackfield.Engine, batch: list[list[int]], count: int) -> Bits:
    found = engine.generate(batch, max_new_tokens=count, logprobs=1)
    return {
        tuple(prompt): (c.token_ids, [entry.logprob for entry in c.logprobs])
        for prompt, c in zip(batch, found, strict=True)
    }


def assert_same_bits(model: Any, lengths: range, count: int, rounds: int, **more: Any) -> None:
    chance = random.Random(3)
    every = [[chance.randrange(5, 60) for _ in range(n)] for n in lengths]
    with jackfield.load(model, deterministic=True, max_batch_size=44, **more) as engine:
        expected = bits(engine, every, count)
        for _ in range(rounds):
            for size in BATCHES:
                found = bits(engine, chance.sample(every, size), count)
                assert found == {prompt: expected[prompt] for prompt in found}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
@pytest.mark.one_in(4)
def test_a_tiny_model_in_any_batch(family: str, threads: None) -> None:
    model = build(family, torch.float32)
    if family == "mixtral":
        model.set_experts_implementation("eager")
    assert_same_bits(model, range(3, 47), 3, rounds=1)


def test_the_demo_model_in_any_batch(threads: None) -> None:
    assert_same_bits("demo", range(3, 135, 3), 2, rounds=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_shuffled_ten_times(dtype: str) -> None:
    assert_same_bits("demo", range(3, 135, 3), 16, rounds=10, dtype=dtype)


def test_chunks_budgets_and_preemptions_change_no_bit() -> None:
    model = build("llama", torch.float32)
    batch = prompts(tuple(range(3, 27)))
    bounds: list[dict[str, Any]] = [
        {},
        {"max_batch_size": 4, "max_batch_tokens": 68},
        {"cache_implementation": "paged?page_size=4&num_tokens=120"},
        {"cache_implementation": "paged?page_size=4&num_tokens=120&swap=true"},
        {"scheduler": "short-first", "max_batch_size": 3},
    ]
    seen, preemptions = [], 0
    for bound in bounds:
        with jackfield.load(model, deterministic=True, **bound) as engine:
            seen.append(bits(engine, batch, 12))
            preemptions += engine.statistics().preemptions
    assert seen[1:] == seen[:1] * 4
    assert preemptions


@pytest.mark.parametrize("width", [8, 48, 192, 4864, 11008, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_its_bits_wherever_it_stands(
    width: int, dtype: torch.dtype, threads: None
) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(37, width, dtype=dtype), torch.randn(24, width, dtype=dtype)
    acts = (functional.silu, torch.cos, torch.sigmoid, lambda x: x.exp(), lambda x: x**3)
    products = (
        lambda x: functional.linear(x, weight),
        lambda x: torch.addmm(weight[:, 0], x, weight.T),
        lambda x: x @ weight.T,
        lambda x: x[None] @ weight.T[None],
    )
    with _FixedShapes():
        for function in (*acts, *products):
            whole = function(rows).view(37, -1)
            for count in (1, 2, 5, 36):
                assert torch.equal(function(rows[-count:]).view(count, -1), whole[-count:])


def test_values_are_those_of_torch() -> None:
    rows, weight = torch.randn(5, 3, 20).double(), torch.randn(7, 20).double()
    for function in (
        lambda x: functional.linear(x, weight),
        lambda x: torch.matmul(x, weight.T),
        lambda x: torch.bmm(x, x.transpose(1, 2)),
        functional.gelu,
        torch.tanh,
    ):
        expected = function(rows)
        with _FixedShapes():
            torch.testing.assert_close(function(rows), expected)


def test_what_cannot_be_done_in_blocks_is_refused() -> None:
    with _FixedShapes(), pytest.raises(ExecutionError, match="calls einsum"):
        torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"cache_implementation": "dynamic"}, "pads rows"),
        ({"cache_implementation": "paged?prefix_sharing=true"}, "drop one of them"),
        ({"attn_implementation": "flex_attention"}, "batch-invariant"),
    ],
)
def test_what_depends_on_the_batch_is_refused_before_weights(
    more: dict[str, str], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        jackfield.plan("demo", deterministic=True, **more)


def test_experts_are_computed_one_by_one(tmp_path: Path) -> None:
    model = build("mixtral", torch.float32)
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(PlanError, match=r"depend on the batch.*set_experts_implementation"):
        jackfield.load(model, deterministic=True)
    plan = jackfield.plan(model.config, deterministic=True)
    assert plan.requirements.experts_implementation == "eager"
    model.save_pretrained(tmp_path)
    assert_same_bits(tmp_path, range(3, 47), 2, rounds=1)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
@pytest.mark.parametrize(
    "selections",
    [
        {},
        {"attn_implementation": "eager"},
        {"attn_implementation": "sdpa", "cache_implementation": "paged"},
        {"attn_implementation": "triton?num_splits=1", "kernels": "triton-rms-norm"},
    ],
)
def test_accelerators_keep_no_bits(device: str, selections: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"not kept on {device}, where .*device_map='cpu'"):
        jackfield.estimate(
            config_of("llama"), device_map=device, device_memory="80GB", deterministic=True,
            **selections,
        )  # fmt: skip


def test_nor_do_layers_on_one_beside_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    config, kept = config_of("llama"), {"device_map": "cpu"}
    places = {"model.embed_tokens": "cpu", "": 0}
    for where in ({}, {"device_map": 0}, {"device_map": "cuda:0"}, {"device_map": places}):
        with pytest.raises(PlanError, match="not kept on cuda"):
            jackfield.plan(config, deterministic=True, **where)
    assert jackfield.plan(config, deterministic=True, **kept).requirements.batch_invariant
