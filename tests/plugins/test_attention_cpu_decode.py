"""Attention `cpu_decode`: its kernel against torch's and over pages, and how it is compiled."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from families import WINDOW, build, config_of, prompts, references
from hypothesis import given
from hypothesis import strategies as st
from packed import layer_of, queries_of, reference, step_of
from samples import sampled
from torch.nn.functional import scaled_dot_product_attention

import jackfield
from jackfield.errors import ExecutionError, PlanError
from jackfield_plugins.attention.cpu_decode.build import KERNEL
from jackfield_plugins.attention.cpu_decode.call import Kernel
from jackfield_plugins.native import NativeKernel, compiling

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(
    bool(KERNEL.cannot_build()), reason="needs a C++ compiler, on Linux"
)

#: The distance to the float64 result: float32's and float64's own, and one rounding of the output.
BOUND = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
HEAD_SIZES = (4, 8, 12, 16, 24, 31, 32, 64, 72, 80, 96, 100, 128, 192, 256)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(
    batch: int, heads: int, keys: int, size: int, dtype: torch.dtype, layout: str, seed: int = 0
) -> torch.Tensor:
    """Random `[batch, heads, keys, size]` that lies in memory as caches and models have it."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "static":  # the first keys of a longer buffer, whose tail nobody may read
        whole = torch.full((batch, heads, keys + 9, size), float("nan")).to(dtype)
        whole[:, :, :keys] = torch.randn(batch, heads, keys, size, generator=generator).to(dtype)
        return whole[:, :, :keys]
    if layout == "by token":
        return torch.randn(batch, keys, heads, size, generator=generator).to(dtype).transpose(1, 2)
    if layout == "sparse":  # heads that are not dense
        return torch.randn(batch, heads, keys, 2 * size, generator=generator).to(dtype)[..., ::2]
    return torch.randn(batch, heads, keys, size, generator=generator).to(dtype)


def exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """torch's attention in float64, as `[batch, 1, heads, value_dim]`."""
    found = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2)


def masked(kind: str, batch: int, keys: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    at, row = torch.arange(keys), torch.arange(batch)[:, None]
    seen = {
        "padded": at >= row * keys // (batch + 1),
        "unwritten": at <= keys // 2 + 0 * row,
        "holes": ((at + row) % 3 > 0) & (at > keys // 8) | (at == keys - 1),
        "nothing": (at >= 0) & (row > 0),
        "one for all": (at >= keys // 3)[None],
    }[kind]
    return seen[:, None, None]


@given(
    batch=st.integers(1, 4),
    heads=st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 5, 7, 8, 13))),
    sizes=st.tuples(st.sampled_from(HEAD_SIZES), st.sampled_from((None, *HEAD_SIZES))),
    keys=st.one_of(st.integers(1, 70), st.integers(200, 600), st.just(1500)),
    dtype=st.sampled_from(list(BOUND)),
    mask=st.sampled_from(("none", "padded", "unwritten", "holes", "nothing", "one for all")),
    layout=st.sampled_from(("plain", "static", "by token", "sparse")),
    scaling=st.sampled_from((None, 0.3)),
    threads=st.sampled_from((1, 2)),
)
def test_kernel_equals_torch(
    batch, heads, sizes, keys, dtype, mask, layout, scaling, threads
) -> None:
    kv_heads, size, value_size = heads[0], sizes[0], sizes[1] or sizes[0]
    query = draw(batch, kv_heads * heads[1], 1, size, dtype, "by token")
    key = draw(batch, kv_heads, keys, size, dtype, layout, 1)
    value = draw(batch, kv_heads, keys, value_size, dtype, layout, 2)
    seen = masked(mask, batch, keys)
    scale = min(scaling or 1, size**-0.5) if scaling else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Kernel().padded(query, key, value, seen, scale)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == dtype
    assert found.is_contiguous()
    bound = BOUND[dtype]
    torch.testing.assert_close(
        found.double(), exactly(query, key, value, seen, scale), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("dtype", BOUND)
def test_rounding_is_to_the_nearest(kernel: Kernel, dtype: torch.dtype) -> None:
    """One key: the output is the value, which must survive; a mean of two rounds as torch does."""
    values = torch.tensor([1e-7, 6e-5, 1.0, -2.5, 3.14159, -60000.0, 0.1, 0.0] * 4).to(dtype)
    value = torch.stack([values, values.roll(1)])[None, None]
    zero = value.new_zeros(1, 1, 1, 32)
    one = kernel.padded(zero, zero, value[:, :, :1])
    assert torch.equal(one.flatten(), values)
    mean = kernel.padded(zero, zero.expand(1, 1, 2, 32), value)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(mean.flatten(), (value.to(wide).sum(2) / 2).to(dtype).flatten())


@pytest.mark.parametrize("dtype", BOUND)
def test_infinity_and_not_a_number_stay_what_they_are(kernel: Kernel, dtype: torch.dtype) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0] * 8).to(dtype)
    zero = values.new_zeros(1, 1, 1, 32)
    found = kernel.padded(zero, zero, values[None, None, None])
    torch.testing.assert_close(found.flatten(), values, equal_nan=True)
    bad_query = kernel.padded(zero + float("nan"), zero, zero)
    assert bad_query.isnan().all()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("size", [8, 72])
def test_what_is_hidden_may_be_anything(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    """E.g. what a draft left behind that was not accepted; in each chunk, and in a whole one."""
    batch, keys = 2, 900
    query = draw(batch, 6, 1, size, dtype, "by token")
    key, value = (draw(batch, 2, keys, size, dtype, "plain", seed) for seed in (1, 2))
    seen = masked("holes", batch, keys)
    assert seen is not None
    seen[:, :, :, 200:600] = False
    expected = exactly(query, key, value, seen)
    for number in ("inf", "nan"):
        key, value = (states.masked_fill(~seen.mT, float(number)) for states in (key, value))
        found = kernel.padded(query, key, value, seen)
        torch.testing.assert_close(found.double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


def test_large_scores_do_not_overflow(kernel: Kernel) -> None:
    query = torch.full((1, 2, 1, 64), 30.0)
    key = draw(1, 1, 900, 64, torch.float32, "plain") * 30
    value = draw(1, 1, 900, 64, torch.float32, "plain", 1)
    expected = exactly(query, key, value).float()
    torch.testing.assert_close(kernel.padded(query, key, value), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("two_threads")
def test_result_depends_neither_on_threads_nor_on_the_batch(kernel: Kernel) -> None:
    """Nor on padding: chunks of keys begin with the first one that is seen."""
    query = draw(3, 8, 1, 64, torch.float32, "plain")
    key, value = (draw(3, 2, 1500, 64, torch.float32, "plain", seed) for seed in (1, 2))
    starts = torch.tensor([0, 700, 333])
    mask = (torch.arange(1500) >= starts[:, None])[:, None, None]
    together = kernel.padded(query, key, value, mask)
    torch.set_num_threads(1)
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        alone = kernel.padded(query[one], key[one, :, start:], value[one, :, start:])
        assert torch.equal(alone, together[one])


@given(
    lengths=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(2, 9)), st.integers(0, 700)),
        min_size=1,
        max_size=5,
    ),
    heads=st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 7))),
    sizes=st.tuples(st.sampled_from(HEAD_SIZES), st.sampled_from((None, 16, 40))),
    page_size=st.sampled_from((1, 4, 16, 32, 33)),
    window=st.one_of(st.none(), st.integers(1, 400)),
    threads=st.sampled_from((1, 2)),
)
def test_pages_equal_the_reference(lengths, heads, sizes, page_size, window, threads) -> None:
    """Slots that nobody may read are not a number; rows of several queries are left alone."""
    step = step_of([(queries, queries + before) for queries, before in lengths])
    layer = layer_of(
        step, kv_heads=heads[0], head_dim=sizes[0], value_dim=sizes[1], page_size=page_size,
        window=window,
    )  # fmt: skip
    query = queries_of(step, heads[0] * heads[1], layer)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Kernel().packed(query, layer, 0.2)
    finally:
        torch.set_num_threads(before)
    expected = reference(query, layer, scaling=0.2)
    single = [span.query_start for span in step.spans if span.query_len == 1]
    torch.testing.assert_close(found[single], expected[single], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("family", ["llama", "mistral", "llama-wide-heads", "deepseek-v3"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "paged?page_size=4"])
def test_ragged_batch_equals_the_oracle(family: str, cache: str) -> None:
    if family == "deepseek-v3" and cache == "static":
        pytest.skip("refused: heads of two sizes")
    lengths, count = (WINDOW - 2, WINDOW + 1, 3 * WINDOW), WINDOW + 3
    with jackfield.load(
        build(family), attn_implementation="cpu_decode", cache_implementation=cache
    ) as engine:
        found = engine.generate(prompts(lengths), max_new_tokens=count)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == references(family, lengths, count)
    assert seen.name == "cpu_decode"
    assert seen.source.startswith("its own kernel, compiled by ")
    assert set(seen.decode.values()) == {count - 1}


def test_prompts_and_decode_in_one_packed_step() -> None:
    """Read in sevens, the longest prompt takes four steps; the shortest decodes from the second."""
    lengths, count = (6, 9, 24), 11
    with jackfield.load(
        build("mistral"),
        attn_implementation="cpu_decode",
        cache_implementation="paged?page_size=4",
        prefill_chunk_size=7,
    ) as engine:
        found = engine.generate(prompts(lengths), max_new_tokens=count)
        seen = engine.report()["attention"]
    assert [completion.token_ids for completion in found] == references("mistral", lengths, count)
    assert set(seen.prefill.values()) == {4}
    assert set(seen.decode.values()) == {4 + count - 1 - 1}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"key": (1, 2, 5, 32)}, "cannot read what it was given: it takes query"),
        ({"value": (1, 2, 4, 16)}, "it takes query"),
        ({"query": (1, 3, 1, 16)}, "it takes query"),
        (
            {"mask": torch.zeros(1, 1, 1, 5)},
            r"mask of bool \[1, 1, 1, 5\].*here mask: torch.fl",
        ),
        ({"mask": torch.ones(1, 4, 1, 5, dtype=torch.bool)}, "it takes a mask of bool"),
    ],
)
def test_what_it_cannot_read_is_refused(kernel: Kernel, what: dict, message: str) -> None:
    shapes = {"query": (1, 4, 1, 16), "key": (1, 2, 5, 16), "value": (1, 2, 5, 16)}
    mask = what.pop("mask", None)
    tensors = [torch.zeros(shape) for shape in (shapes | what).values()]
    with pytest.raises(ExecutionError, match=message):
        kernel.padded(*tensors, mask)


def test_no_gradients(kernel: Kernel) -> None:
    query = torch.zeros(1, 2, 1, 16, requires_grad=True)
    with pytest.raises(ExecutionError, match="no gradients"):
        kernel.padded(query, query.detach(), query.detach())


def test_without_a_compiler_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PlanError, match=r"needs a C\+\+ compiler .* `apt install g\+\+`"):
        jackfield.plan(config_of("llama"), attn_implementation="cpu_decode")
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert "(CXX=no-such-compiler -v is not one)" in KERNEL.cannot_build()[0]
    assert another().cannot_load() == KERNEL.cannot_build()  # and nothing is tried


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is compiled yet, and the cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jackfield"


def another() -> NativeKernel:
    """The kernel as a process that has not loaded it sees it."""
    return NativeKernel(KERNEL.name, KERNEL.folder, KERNEL.instead)


def test_it_is_compiled_once(fresh: Path, tmp_path: Path) -> None:
    """Many at once, each a process of its own to the cache: one file, and nothing half made."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / compiling.SOURCE).write_text('extern "C" int seven() { return 7; }\n')

    def load() -> ctypes.CDLL:
        return NativeKernel("small", folder, KERNEL.instead).library()

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda _: load(), range(6)))
    assert {library.seven() for library in made} == {7}
    assert len({library._name for library in made}) == 6  # the loader takes two of one name for one
    (path,) = fresh.iterdir()
    written = path.stat().st_ino  # a file is written beside, and put in its place
    load()
    assert path.stat().st_ino == written


def test_a_failing_compiler_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiling.compiler()
    assert command is not None
    monkeypatch.setenv("CXX", f"{command[0]} --no-such-option")
    with pytest.raises(PlanError, match=r"cannot compile its kernel \(.*no-such-option"):
        another().library()
    assert not any(fresh.iterdir())


def test_a_folder_that_cannot_be_written_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.write_text("a file")
    with pytest.raises(PlanError, match="set XDG_CACHE_HOME to a folder that can be written"):
        another().library()


WITHOUT = ("-mno-avx512f", "-mno-avx", "-mno-avx512bf16", "-mno-amx-bf16")


@pytest.mark.parametrize("flag", sampled(WITHOUT, 4))
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's flags")
@pytest.mark.long
def test_narrower_vectors_give_the_same(fresh: Path, flag: str, forks: Forks) -> None:
    """AVX2's and those that every such processor has, in a process of their own."""
    command = compiling.compiler()
    assert command is not None
    program = (
        "import sys; sys.path += sys.argv[1:]\n"
        "from sanitizing import trapping\n"
        "import test_attention_cpu_decode as t\n"
        "t.compiling.FLAGS = trapping('-O1')\n"
        "for dtype in t.BOUND:\n"
        "    for size, group in ((8, 1), (72, 7), (64, 2), (80, 3)):\n"
        "        t.test_kernel_equals_torch.hypothesis.inner_test(\n"
        "            2, (2, group), (size, None), 300, dtype, 'holes', 'static', None, 2)\n"
        "import test_cpu_prompts as p\n"
        "for dtype in p.BOUND:\n"
        "    for size, group, window, block in "
        "((8, 1, None, None), (72, 7, 60, 9), (17, 2, None, 140)):\n"
        "        p.test_pages_equal_the_reference.hypothesis.inner_test(\n"
        "            [(150, 30), (20, 200)], (2, group), (size, None), 16, window, dtype, 0, 2,\n"
        "            block)"
    )
    environ = {**os.environ, "CXX": f"{command[0]} {flag}"}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "conformance")]
    done = forks.python("-c", program, *folders, env=environ)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/sh\necho x >> {calls}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv(compiling.CACHE, str(tmp_path / "cache"))
    first = jackfield.plan("demo")
    asked = calls.read_text()
    assert first["attention"].registered.name == "sdpa"
    assert any("cannot compile" in " ".join(r.reasons) for r in first.refusals)
    jackfield.plan("demo")
    assert calls.read_text() == asked


def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path / 'child'}\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setattr(compiling, "SECONDS", 1)
    with pytest.raises(compiling.CompilingError, match="does not run"):
        compiling.run([str(fake)])
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")

    def runs() -> bool:
        try:
            return state.read_text().split()[2] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    until = time.monotonic() + 30  # a killed process ends when it gets its turn
    while runs() and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs()
