"""The kernel for prompts of `cpu_decode`: over pages against the reference, and its bits."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import layer_of, queries_of, reference, step_of
from refused_tiles import run_without_tiles

from jackfield.contracts import PackedLayer, PageTables
from jackfield.errors import ExecutionError
from jackfield_plugins.attention.cpu_decode.build import KERNEL
from jackfield_plugins.attention.cpu_decode.prompts import Prompts

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(
    bool(KERNEL.cannot_build()), reason="needs a C++ compiler, on Linux"
)

#: The distance to the float64 result. Weights of bfloat16 are rounded too, as torch rounds them.
BOUND = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}
HEAD_SIZES = (1, 3, 4, 8, 12, 17, 24, 31, 32, 33, 64, 72, 80, 100, 128)
KEYS, LANES = 128, 192  # the kernel's blocks: lengths around their multiples are the hard ones


def attended(query: torch.Tensor, layer: PackedLayer, scaling: float, few: int = 0) -> torch.Tensor:
    out = query.new_full((*query.shape[:2], layer.values.shape[3]), 77.0)
    Prompts().attend(query, layer, out, scaling, few)
    return out


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(
    lengths=st.lists(
        st.tuples(
            st.one_of(st.integers(1, 40), st.integers(LANES - 2, LANES + 2), st.just(215)),
            st.one_of(st.integers(0, 40), st.integers(KEYS - 2, KEYS + 2), st.just(300)),
        ),
        min_size=1,
        max_size=2,
    ),
    heads=st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 3, 7, 16))),
    sizes=st.tuples(st.sampled_from(HEAD_SIZES), st.sampled_from((None, 1, 16, 41))),
    page_size=st.sampled_from((1, 4, 16, 33)),
    window=st.one_of(st.none(), st.integers(1, 300)),
    dtype=st.sampled_from(list(BOUND)),
    few=st.sampled_from((0, 16)),
    threads=st.sampled_from((1, 2)),
    block=st.one_of(st.none(), st.integers(1, 20), st.integers(KEYS - 1, LANES + 2)),
)
def test_pages_equal_the_reference(
    lengths, heads, sizes, page_size, window, dtype, few, threads, block
) -> None:
    """Slots that nobody may read are not a number; who has few queries is left alone."""
    step = step_of([(queries, queries + before) for queries, before in lengths])
    layer = layer_of(
        step, kv_heads=heads[0], head_dim=sizes[0], value_dim=sizes[1], page_size=page_size,
        window=window, dtype=dtype, block=block,
    )  # fmt: skip
    query, scaling = queries_of(step, heads[0] * heads[1], layer), sizes[0] ** -0.5
    torch.set_num_threads(threads)
    found = attended(query, layer, scaling, few)
    expected = reference(query, layer, scaling=scaling)
    for row, span in enumerate(step.spans):
        at = slice(span.query_start, span.query_start + span.query_len)
        ends = layer.ends(row)
        back = torch.arange(span.kv_len - span.query_len + 1, span.kv_len + 1)
        if span.query_len <= few and (ends is None or torch.equal(ends[:, 0], back.int())):
            assert (found[at] == 77).all()
            continue
        bound = BOUND[dtype]
        torch.testing.assert_close(found[at].double(), expected[at], atol=bound, rtol=bound)


def part(layer: PackedLayer, queries: int, kv_len: int) -> PackedLayer:
    """The only sequence of `layer` when it had `kv_len` tokens, the last of them as queries."""
    tables = layer.tables
    step = step_of([(queries, kv_len)])
    held = PageTables(
        step, tables.window, tables.page_size, tables.block_table, tables.first, tables.tables,
        tables.firsts,
    )  # fmt: skip
    return PackedLayer(layer.keys, layer.values, held)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(("group", "window"), [(1, None), (7, None), (3, 50), (2, 200)])
@pytest.mark.one_in(4)
def test_bits_depend_neither_on_chunks_nor_on_the_batch_nor_on_threads(
    dtype: torch.dtype, group: int, window: int | None
) -> None:
    count = 2 * LANES + 21
    whole = layer_of(step_of([(count, count)]), kv_heads=2, head_dim=24, window=None, dtype=dtype)
    whole.tables = replace(whole.tables, window=window, runs=())
    query = queries_of(whole.step, 2 * group, whole)
    torch.set_num_threads(1)
    expected = attended(query, whole, 0.2)
    torch.set_num_threads(2)
    assert same_bits(attended(query, whole, 0.2), expected)
    for size in (1, 7, 64, KEYS, KEYS + 1, 301):
        for start in range(0, count, size):
            end = min(start + size, count)
            found = attended(query[start:end], part(whole, end - start, end), 0.2)
            assert same_bits(found, expected[start:end]), (size, start)
    together = layer_of(
        step_of([(33, 50), (count, count), (5, 9)]), kv_heads=2, head_dim=24, dtype=dtype
    )
    together.tables = replace(together.tables, window=window, runs=())
    own = whole.flat_keys[slots(whole, 0)], whole.flat_values[slots(whole, 0)]
    together.flat_keys[slots(together, 1)], together.flat_values[slots(together, 1)] = own
    several = queries_of(together.step, 2 * group, together).contiguous()
    several[33 : 33 + count] = query
    assert same_bits(attended(several, together, 0.2)[33 : 33 + count], expected)


@pytest.mark.parametrize("dtype", list(BOUND))
def test_a_zero_has_no_sign(dtype: torch.dtype) -> None:
    """Of what is too small for a dtype; whether 0 was added to it hangs on the queries beside."""
    layer = layer_of(step_of([(100, 100)]), kv_heads=1, head_dim=16, value_dim=1, dtype=dtype)
    layer.flat_keys.zero_(), layer.flat_values.zero_()
    least = torch.finfo(dtype).tiny
    for at, value in ((2, least), (40, -1.5 * least)):
        layer.flat_values[slots(layer, 0)[at]] = value
    query = queries_of(layer.step, 1, layer)
    whole = attended(query, layer, 0.2)
    for end in range(41, 64):
        assert same_bits(attended(query[:end], part(layer, end, end), 0.2), whole[:end]), end


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 alone has tiles")
def test_a_process_that_may_not_use_tiles(tmp_path: Path, forks: Forks) -> None:
    program = (
        "import test_cpu_prompts as t\n"
        "t.test_a_zero_has_no_sign(t.torch.bfloat16)\n"
        "for size, group, window, block in "
        "((8, 1, None, None), (72, 7, 60, 9), (3, 2, None, 140)):\n"
        "    t.test_pages_equal_the_reference.hypothesis.inner_test(\n"
        "        [(150, 30), (20, 200)], (2, group), (size, None), 16, window, t.torch.bfloat16,\n"
        "        0, 2, block)"
    )
    run_without_tiles(program, forks, tmp_path)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def slots(layer: PackedLayer, row: int) -> list[int]:
    size, pages = layer.page_size, layer.tables.tables[row]
    return [pages[at // size] * size + at % size for at in range(layer.step.spans[row].kv_len)]


@pytest.mark.parametrize("dtype", list(BOUND))
def test_large_scores_and_what_is_no_number(dtype: torch.dtype) -> None:
    """The largest score decides; what is not a number reaches those alone that see it."""
    step = step_of([(200, 200)])
    layer = layer_of(step, kv_heads=1, head_dim=16, dtype=dtype)
    query = queries_of(step, 2, layer) * 30
    expected = reference(query, layer, scaling=30.0)
    torch.testing.assert_close(
        attended(query, layer, 30.0).double(), expected, atol=0.1, rtol=BOUND[dtype]
    )
    layer.flat_keys[slots(layer, 0)[150], 0, 3] = float("nan")
    found = attended(query, layer, 0.1)
    assert found[150:].isnan().all()
    assert found[:150].isfinite().all()


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("first", [1, 2, 127, 131])
def test_a_table_may_begin_with_any_token(dtype: torch.dtype, first: int) -> None:
    """Also where no window hides what comes before it."""
    step = step_of([(40, 200)])
    layer = layer_of(step, kv_heads=1, head_dim=16, page_size=1, dtype=dtype)
    whole = layer.tables
    layer.tables = replace(
        whole,
        block_table=whole.block_table[:, first:].contiguous(),
        first=torch.tensor([first], dtype=torch.int32),
        tables=[whole.tables[0][first:]],
        firsts=[first],
    )
    query, bound = queries_of(step, 2, layer), BOUND[dtype] / 4
    expected = reference(query, layer, scaling=0.25)
    torch.testing.assert_close(
        attended(query, layer, 0.25).double(), expected, atol=bound, rtol=bound
    )


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("window", [None, 9, 150])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_values_that_are_not_finite_reach_those_alone_that_see_them(
    dtype: torch.dtype, window: int | None, number: float
) -> None:
    """A weight of 0 does not hide them; pages of a prompt's beginning may be another's, too."""
    count, at = 2 * LANES + 21, 250
    layer = layer_of(step_of([(count, count)]), kv_heads=2, head_dim=24, dtype=dtype)
    layer.tables = replace(layer.tables, window=window, runs=())
    query = queries_of(layer.step, 4, layer)
    clean = attended(query, layer, 0.2)
    layer.flat_values[slots(layer, 0)[at], 1, 3] = number
    found = attended(query, layer, 0.2)
    changed = torch.zeros_like(found, dtype=torch.bool)
    changed[at : at + (window or count), 2:, 3] = True
    assert torch.equal(found[~changed], clean[~changed])
    assert not found[changed].isfinite().any()


def status(field: str) -> int:
    """KiB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="reads memory from Linux's /proc"
)
def test_memory_is_that_of_some_blocks_whatever_the_length() -> None:
    """Scores of 512 queries and 16,000 keys would be 32 MB a head."""
    peaks = []
    for count in (1000, 16000):
        layer = layer_of(step_of([(512, count)]), kv_heads=1, head_dim=8, dtype=torch.float32)
        query = queries_of(layer.step, 1, layer)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = status("VmRSS")
        attended(query, layer, 0.3)
        peaks.append(status("VmHWM") - before)
    assert max(peaks) < 4096, peaks  # KiB


@pytest.mark.parametrize(
    ("what", "value"),
    list(itertools.product(("block_table", "first", "seq_lens", "cu_seqlens_q"), (-1, 1 << 20))),
)
def test_tables_that_lead_out_of_the_pools_are_refused(what: str, value: int) -> None:
    step = step_of([(40, 60)])
    layer = layer_of(step, kv_heads=1, head_dim=8)
    query = queries_of(step, 1, layer)
    holder = layer.tables if what in ("block_table", "first") else step
    spoilt = getattr(holder, what).clone()
    spoilt.view(-1)[-1] = value
    changed = replace(holder, **{what: spoilt})
    tables = changed if holder is layer.tables else replace(layer.tables, step=changed)
    with pytest.raises(ExecutionError, match="cannot read what its page tables say"):
        attended(query, PackedLayer(layer.keys, layer.values, tables), 0.3)
