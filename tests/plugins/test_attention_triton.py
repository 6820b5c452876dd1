"""The Triton attention: its kernels against a plain reference, its models against transformers.

Without a CUDA GPU the kernels run under Triton's interpreter (tests/conftest.py), in float64, where
tokens are equal exactly. On a GPU they are compiled, and float64 is left to the interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WINDOW, build, config_of, prompts, references
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packed import layer_of, queries_of, reference, step_of
from samples import share

import jackfield
from jackfield.contracts import PackedLayer, PageTables
from jackfield.errors import OptionError, PlanError

pytest.importorskip("triton", reason="Triton is not installed: pip install 'jackfield[triton]'")

from jackfield_plugins.attention.triton import TritonAttention, launch, warming
from jackfield_plugins.attention.triton.launch import PagedAttention, paged_attention
from jackfield_plugins.attention.triton.tiles import (
    MAX_SPLITS,
    Tile,
    choose_splits,
    decode_limit,
)
from jackfield_plugins.attention.triton.variants import Shape, interpreted

NATIVE = not interpreted()
DEVICE = "cuda" if NATIVE else "cpu"
EXACT = torch.float32 if NATIVE else torch.float64
SMALL = Tile(16, 16, 4, 1)  # several tiles of rows and of keys even where tensors are tiny
LENGTHS = (WINDOW - 2, WINDOW + 1, 3 * WINDOW)
COUNT = WINDOW + 3
SERVED = ("llama", "llama-mqa", "llama-wide-heads", "mistral", "gemma2", "gpt-oss")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums: `expected` is float64."""
    bound = 1e-5 if found.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


SEQUENCE = st.tuples(
    st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 60)
).map(lambda pair: (pair[0], sum(pair)))  # fmt: skip


@settings(
    max_examples=share(0.6 if NATIVE else 0.3),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # interpreted, shrinking takes minutes
)
@given(
    sizes=st.lists(SEQUENCE, min_size=1, max_size=4),
    heads=st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 8))),
    head_dim=st.sampled_from((8, 16, 24, 64, 72, 80, 128)),
    value_dim=st.sampled_from((None, 16, 40)),
    page_size=st.one_of(st.integers(1, 64), st.sampled_from((4, 8, 16, 32))),  # also whole blocks
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from((None, 2.0, 50.0)),
    with_sinks=st.booleans(),
    num_splits=st.one_of(st.none(), st.integers(1, 5)),
    tile=st.sampled_from((None, SMALL)),
    block=st.one_of(st.none(), st.integers(1, 30)),
)
def test_kernels_equal_the_reference(
    sizes, heads, head_dim, value_dim, page_size, window, softcap, with_sinks, num_splits, tile,
    block,
) -> None:  # fmt: skip
    layer = layer_of(
        step_of(sizes, DEVICE), kv_heads=heads[0], head_dim=head_dim, value_dim=value_dim,
        page_size=page_size, window=window, dtype=EXACT, device=DEVICE, block=block,
    )  # fmt: skip
    query = queries_of(layer.step, heads[0] * heads[1], layer)
    sinks = torch.linspace(-2, 4, query.shape[1], dtype=EXACT, device=DEVICE)
    semantics = {
        "scaling": head_dim**-0.5, "softcap": softcap, "sinks": sinks if with_sinks else None
    }  # fmt: skip
    found = paged_attention(query, layer, **semantics, num_splits=num_splits, tile=tile)
    assert found.is_contiguous()
    assert_close(found, reference(query, layer, **semantics))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [((1, 60), (1, 7)), ((33, 33), (5, 50), (1, 20))])
@pytest.mark.one_in(4)
def test_error_is_that_of_the_dtype(dtype: torch.dtype, sizes: tuple[tuple[int, int], ...]) -> None:
    """The bound is thrice what plain torch loses in the same dtype: a score is rounded once by its
    product, and here again by the factor log2(e) and by the running maximum.
    """
    layer = layer_of(step_of(sizes, DEVICE), kv_heads=2, head_dim=72, dtype=dtype, device=DEVICE)
    query = queries_of(layer.step, 8, layer)
    for softcap in (None, 5.0):
        exact = reference(query, layer, scaling=0.2, softcap=softcap)
        plain = reference(query, layer, scaling=0.2, softcap=softcap, dtype=dtype)
        for num_splits in (1, 3):
            found = paged_attention(
                query, layer, scaling=0.2, softcap=softcap, num_splits=num_splits, tile=SMALL
            )
            assert found.dtype == dtype
            bound = 3 * (plain.double() - exact).abs().max()
            assert (found.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("group", [1, 3, 4, 16, 71])
@pytest.mark.one_in(4)
def test_drafts_to_verify_are_decode_and_longer_feeds_are_prefill(group: int) -> None:
    """Around the length at which rows pass from one kernel to the other, in one step."""
    limit = decode_limit(group, 16, EXACT.itemsize)
    sizes = [(n, n + 30) for n in (limit + 1, limit, max(1, limit - 1), 1)]
    layer = layer_of(
        step_of(sizes, DEVICE), kv_heads=1, head_dim=16, page_size=4, window=9, dtype=EXACT,
        device=DEVICE,
    )  # fmt: skip
    query = queries_of(layer.step, group, layer)
    found = paged_attention(query, layer, scaling=0.25, num_splits=2, tile=SMALL)
    assert_close(found, reference(query, layer, scaling=0.25))


def test_result_does_not_depend_on_the_batch_with_a_number_of_splits() -> None:
    together = layer_of(
        step_of([(1, 50), (1, 9), (1, 200)], DEVICE),
        kv_heads=2, head_dim=16, dtype=EXACT, device=DEVICE,
    )  # fmt: skip
    query = queries_of(together.step, 4, together)
    held = together.tables
    own = PageTables(
        step_of([(1, 50)], DEVICE), None, held.page_size, held.block_table[:1], held.first[:1],
        held.tables[:1], held.firsts[:1],
    )  # fmt: skip
    alone = PackedLayer(together.keys, together.values, own)
    found, by_itself = (
        paged_attention(q, layer, scaling=0.25, num_splits=4)
        for q, layer in ((query, together), (query[:1], alone))
    )
    assert torch.equal(found[:1], by_itself)


def test_pages_before_the_window_are_not_read() -> None:
    """Not only masked: what lies there may be anything, and takes no time."""
    step = step_of([(1, 64), (12, 64)], DEVICE)
    layer = layer_of(step, kv_heads=1, head_dim=16, page_size=4, dtype=EXACT, device=DEVICE)
    query = queries_of(step, 2, layer)
    layer.tables.window = 6
    expected = reference(query, layer, scaling=0.25)
    for row, span in enumerate(step.spans):
        for page in range((span.kv_len - span.query_len + 1 - 6) // 4):
            layer.block_table[row, page] = 2**30  # far outside the pool
    assert_close(paged_attention(query, layer, scaling=0.25, num_splits=2, tile=SMALL), expected)


def test_splits_occupy_the_processors_but_stay_worth_their_sum() -> None:
    assert choose_splits(programs=512, longest=10**6, keys_per_tile=64, processors=132) == 1
    assert choose_splits(programs=8, longest=10**6, keys_per_tile=64, processors=132) == 32
    assert choose_splits(programs=8, longest=1000, keys_per_tile=64, processors=132) == 4
    assert choose_splits(programs=8, longest=100, keys_per_tile=64, processors=132) == 1
    assert choose_splits(programs=1, longest=10**6, keys_per_tile=64, processors=132) == MAX_SPLITS


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize(("window", "splits"), [(None, 64), (512, 16), (100, 2), (20, 1)])
@pytest.mark.one_in(4)
def test_the_keys_of_a_window_are_split_too(
    queries: int, window: int | None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a decode step sees, not as many as the text has; of two tiles at least."""
    monkeypatch.setattr(launch, "_processors", lambda _: 132)
    layer = layer_of(
        step_of([(queries, 2100), (queries, 30)], DEVICE), kv_heads=1, head_dim=16, page_size=16,
        window=window, dtype=EXACT, device=DEVICE,
    )  # fmt: skip
    query = queries_of(layer.step, 4, layer)
    attend = PagedAttention(tile=SMALL)
    assert_close(attend(query, layer, scaling=0.25), reference(query, layer, scaling=0.25))
    (prepared,) = attend._steps.values()
    assert prepared.prefill is None
    assert prepared.decode == (1, 2, splits)


model_of = functools.cache(build)


@pytest.mark.skipif(NATIVE, reason="float64, where tokens are exact, runs under the interpreter")
@pytest.mark.parametrize(
    ("family", "attention", "page_size"),
    [
        *((family, "triton", 4) for family in SERVED),
        ("mistral", "triton?num_splits=2", 16),
        ("gpt-oss", "triton?num_splits=3", 16),
    ],
)
@pytest.mark.one_in(4)
def test_ragged_batch_equals_the_oracle(family: str, attention: str, page_size: int) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(
        model_of(family),
        attn_implementation=attention,
        cache_implementation=f"paged?page_size={page_size}",
    ) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == expected
    assert seen.name == "triton"
    assert seen.source.startswith("paged_prefill and paged_decode of Triton ")
    assert set(seen.prefill.values()) == {1}
    assert set(seen.decode.values()) == {COUNT - 1}


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt-oss"])
def test_tokens_in_float32_differ_only_where_float32_cannot_tell(family: str) -> None:
    """Greedy tokens; at a first difference the two candidates lie within float32's own error.

    That error is what the model's own attention loses in float32, on the same tokens.
    """
    prompt, count = prompts((3 * WINDOW,))[0], COUNT
    model = build(family, torch.float32).to(DEVICE)
    with jackfield.load(
        model, attn_implementation="triton", cache_implementation="paged?page_size=4"
    ) as engine:
        found = engine.generate(prompt, max_new_tokens=count)[0].token_ids
    expected = references(family, (3 * WINDOW,), count)[0]
    if found == expected:
        return
    at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    ids = torch.tensor([prompt + expected[:at]])
    with torch.inference_mode():
        exact = model_of(family)(ids).logits[0, -1]
        rough = model(ids.to(DEVICE)).logits[0, -1].cpu().double()
    margin = exact[expected[at]] - exact[found[at]]
    bound = 2 * (rough - exact).abs().max()
    assert margin <= bound, f"token {at}: {found[at]}, margin {margin:.2e} of {bound:.2e}"


def test_what_it_lacks_is_refused_by_name() -> None:
    def refusal(family: str, **selections: str) -> str:
        with pytest.raises(PlanError) as caught:
            jackfield.plan(config_of(family), attn_implementation="triton", **selections)
        return str(caught.value)

    assert "does not run with layout padded" in refusal("llama", cache_implementation="dynamic")
    cannot_read = refusal("falcon-alibi", cache_implementation="dynamic")
    assert "does not support position_bias (alibi = True)" in cannot_read


def test_what_only_the_interpreter_can_do_is_refused_natively(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend = TritonAttention()
    job = jackfield.plan(config_of("llama"), attn_implementation="eager").requirements
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    job = replace(job, layout="packed", dtype="float64", head_dims=(8, 576))
    assert backend.refuse(replace(job, device="cpu"), None) == [
        "has no tiles for head size 576 (at most 512)",
        "runs on a CPU only under TRITON_INTERPRET=1, set before Python starts",
    ]
    assert backend.refuse(replace(job, device="cuda"), None)[1:] == [
        "runs float64 only under TRITON_INTERPRET=1; load the model in another dtype",
        "needs a GPU of compute capability 8.0 or later, not 7.5",
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    fits = replace(job, device="cuda", dtype="bfloat16", head_dims=(128,))
    assert backend.refuse(fits, None) == []


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="num_splits must be from 1 to 64, not 0"):
        jackfield.plan(config_of("llama"), attn_implementation="triton?num_splits=0")


def natively(program: str, *arguments: str, cache: Path) -> str:
    """What a program beside this file prints in a process where Triton does not interpret."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *arguments],
        env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("dtypes", "head_dims", "groups"),
    [
        ("bf16", "128", "4"),
        pytest.param("fp16", "16,80,256", "3", marks=pytest.mark.long),
        pytest.param("bf16,fp32", "64,128,256,512", "1,16,71", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_kernels_compile_for_gpus_that_are_not_here(
    dtypes: str, head_dims: str, groups: str, tmp_path: Path
) -> None:
    """To machine code for Ampere, Hopper and Blackwell: with matrix units, in the memory there is.

    99 KiB is what a program may have on the smallest GPU from 8.0 on (8.6, 8.9 and 12.0). Of the
    1,020 bytes that a thread has in registers the assembler may spill an eighth. Most that spills
    does so by choice, up to 32 bytes: a thread gets half of the registers, and more programs run at
    a time. (Given all, heads of 64 took 1.5 times as long on an NVIDIA H200.) Heads of 80 in 16
    bits on 8.0 have no choice: 92 bytes. Tiles that spare them took 1.25 and 2.1 times as long
    on the H200 with heads of 96, and no GPU of 8.0 was at hand.
    """
    printed = natively("compile_triton.py", "80,90,100", dtypes, head_dims, groups, cache=tmp_path)
    every = [json.loads(line) for line in printed.splitlines()]
    assert {found["capability"] for found in every} == {80, 90, 100}
    for found in every:
        assert found["shared"] <= found["most_shared"], found
        assert found["spilled"] <= 128, found
        assert found["registers"] <= 255, found
        assert found["vectors"], found
        if found["kernel"] != "sum_splits" and found["dtype"] != "torch.float32":
            assert found["matrix_unit"], found


def test_nothing_is_compiled_after_loading(tmp_path: Path) -> None:
    """While one sequence decodes to 4,096 tokens, and in batches of 1 to 64 with odd chunks.

    The driver also fails a launch with what its kernel was not compiled for. A model with two
    kinds of layers needs prefill and decode of one or more queries for each, and one sum; a norm
    one kernel for its size.
    """
    found = json.loads(natively("count_triton.py", cache=tmp_path))
    assert found["at_load"] == {"paged_prefill": 2, "paged_decode": 4, "sum_splits": 1}
    assert found["in_all"] == {**found["at_load"], "rms_norm_kernel": 1}
    assert set(found["loose"]) == set(found["at_load"])
    assert not any(found["loose"].values()), "these are told apart by values that change"
    assert len(found["splits"]) > 1


@pytest.mark.parametrize(
    ("family", "windows"), [("llama", [0]), ("mistral", [WINDOW]), ("gemma2", [WINDOW, 0])]
)
def test_what_is_compiled_at_load_is_what_the_layers_are(
    family: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes that are known from the plan, with the cache's pages, against those of a step."""
    monkeypatch.setattr(warming, "interpreted", lambda: False)
    made: list[Shape] = []
    original = PagedAttention.compile

    def compile_(self: PagedAttention, shape: Shape, device: torch.device) -> Any:
        made.append(shape)
        return original(self, shape, device)

    monkeypatch.setattr(PagedAttention, "compile", compile_)
    with jackfield.load(
        model_of(family), attn_implementation="triton", cache_implementation="paged?page_size=16"
    ) as engine:
        at_load = list(made)
        assert [shape.window or 0 for shape in at_load] == windows
        engine.generate(prompts((WINDOW + 2,)), max_new_tokens=2)
    assert set(made) == set(at_load)


def test_without_gpu_and_interpreter_it_says_what_to_do() -> None:
    """In a process of its own, as the choice is made when Triton is imported."""
    program = (
        "import jackfield; from jackfield.registry.discovery import registry\n"
        "from jackfield.spelling import parse\n"
        "print(registry().find('attention', parse('triton')).backend.available())"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert "no CUDA GPU" in done.stdout
    assert "TRITON_INTERPRET=1" in done.stdout
