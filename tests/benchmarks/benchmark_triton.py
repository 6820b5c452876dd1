"""The Triton attention against torch's varlen flash kernel, and against the memory's own speed.

Times are the GPU's: all rounds are queued behind a kernel that only waits, so that what Python
needs for a launch is not part of them. Each round reads other pools than the last, more in all than
a cache holds. Nothing is timed before both agree with a plain reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from packed import layer_of, queries_of, reference, step_of

from jackfield.contracts import PackedLayer
from jackfield_plugins.attention.published import FLASH_PAGE_MULTIPLE as TORCH_PAGE
from jackfield_plugins.attention.published import torch_varlen
from jackfield_plugins.attention.varlen import Rows, Scoring

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA GPU: its kernels have nothing to run on"
)

DEVICE = "cuda"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
SCALING = HEAD_DIM**-0.5
ROUNDS = 40
ROTATED_BYTES = 512 * 2**20  # several times what the largest last-level caches hold

#: sequences × tokens in the cache
DECODES = [(1, 1024), (1, 32768), (16, 1024), (16, 4096), (64, 2048), (128, 4096)]
#: sequences × prompt tokens, each from its first token on
PREFILLS = [(1, 512), (1, 4096), (8, 1024), (4, 4096)]

Run = Callable[[int], torch.Tensor]


@dataclass
class Pools:
    """The same step over pools at different addresses."""

    layers: list[PackedLayer]
    query: torch.Tensor

    def __getitem__(self, round_: int) -> PackedLayer:
        return self.layers[round_ % len(self.layers)]


def pools_of(sizes: list[tuple[int, int]], page_size: int) -> Pools:
    step = step_of(sizes, DEVICE)
    held = sum(end for _, end in sizes) * KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize
    copies = min(64, 1 + ROTATED_BYTES // held)
    layers = [
        layer_of(
            step, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=page_size, dtype=DTYPE,
            device=DEVICE, stale=0.0, seed=seed,
        )
        for seed in range(copies)
    ]  # fmt: skip
    return Pools(layers, queries_of(step, HEADS, layers[0]).contiguous())


def ours(pools: Pools) -> Run:
    from jackfield_plugins.attention.triton.launch import paged_attention

    return lambda i: paged_attention(pools.query, pools[i], scaling=SCALING)


def theirs(pools: Pools) -> Run:
    """torch's kernel as `flash_attention_2` calls it: decode on the same pages, prompts in a row.

    A prompt from its first token on has no need of pages, and neither has a torch without them. The
    adapter gives it the window that lets it split the keys, and what its signature asks for.
    """
    from torch.nn.attention.varlen import varlen_attn

    kernel, step = torch_varlen(varlen_attn), pools.layers[0].step
    ends = torch.nn.functional.pad(step.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = Rows(step.cu_seqlens_q, ends, step.max_seqlen_q, step.max_seqlen_k)
    scoring = Scoring(SCALING)
    if step.max_seqlen_q == 1 and kernel.page_multiple is not None:

        def paged(i: int) -> torch.Tensor:
            layer = pools[i]
            at = replace(rows, block_table=layer.block_table, seqused_k=step.seq_lens)
            return kernel.attend(pools.query, layer.keys, layer.values, at, scoring)

        return paged
    held = [in_a_row(layer) for layer in pools.layers]

    def in_row(i: int) -> torch.Tensor:
        return kernel.attend(pools.query, *held[i % len(held)], rows, scoring)

    return in_row


def in_a_row(layer: PackedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[tokens, kv_heads, head_dim]`, one sequence after the other."""
    found = [layer.gather(row) for row in range(len(layer.step.spans))]
    keys, values = (
        torch.cat(parts, 1).transpose(0, 1).contiguous() for parts in zip(*found, strict=True)
    )
    return keys, values


def gpu_seconds(runs: list[Callable[[int], Any]], rounds: int = ROUNDS) -> list[float]:
    """The median of each of `runs`, which take turns."""
    for i in range(3):  # compiles, and lets the clocks rise
        for run in runs:
            run(i)
    torch.cuda.synchronize()
    torch.cuda._sleep(rounds * len(runs) * 1_000_000)  # half a millisecond for each launch
    events = []
    for i in range(rounds):
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(i)
            end.record()
            events.append((begin, end))
    torch.cuda.synchronize()
    spent = [begin.elapsed_time(end) / 1000 for begin, end in events]
    return [statistics.median(spent[k :: len(runs)]) for k in range(len(runs))]


@pytest.fixture(scope="module")
def copy_bandwidth() -> float:
    """Bytes per second that a copy of 1 GiB reads and writes: the limit that can be reached."""
    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device=DEVICE)
    (seconds,) = gpu_seconds([lambda _: target.copy_(source)], rounds=20)
    return 2 * source.numel() / seconds


def assert_parity(run: Run, pools: Pools) -> None:
    """The error is at most twice that of plain torch in the same dtype, against float32."""
    exact = reference(pools.query, pools[0], scaling=SCALING, dtype=torch.float32)
    plain = reference(pools.query, pools[0], scaling=SCALING, dtype=DTYPE)
    bound = 2 * (plain.float() - exact).abs().max()
    assert (run(0).float() - exact).abs().max() <= bound


def tell(capsys: pytest.CaptureFixture[str], benchmark: Any, line: str, **info: float) -> None:
    benchmark.extra_info.update(info, gpu=torch.cuda.get_device_name())
    with capsys.disabled():
        print(  # noqa: T201 - the figures are what this is for
            f"\n{benchmark.name} on {torch.cuda.get_device_name()}: {line}"
        )


@pytest.mark.parametrize("page_size", [16, TORCH_PAGE])
@pytest.mark.parametrize(("sequences", "tokens"), DECODES)
def benchmark_decode(
    sequences: int,
    tokens: int,
    page_size: int,
    copy_bandwidth: float,
    benchmark: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One query a sequence. torch's kernel always has pages of a size that it takes."""
    sizes = [(1, tokens)] * sequences
    pools = pools_of(sizes, page_size)
    comparable = pools if page_size == TORCH_PAGE else pools_of(sizes, TORCH_PAGE)
    runs = [ours(pools), theirs(comparable)]
    assert_parity(runs[0], pools)
    assert_parity(runs[1], comparable)
    mine, other = benchmark.pedantic(gpu_seconds, args=(runs,), rounds=1)
    moved = 2 * sequences * (tokens * KV_HEADS + HEADS) * HEAD_DIM * DTYPE.itemsize
    share = [moved / seconds / copy_bandwidth for seconds in (mine, other)]
    tell(
        capsys, benchmark,
        f"{mine * 1e6:.1f} µs against {other * 1e6:.1f} µs, ratio {other / mine:.2f}; "
        f"{share[0]:.0%} and {share[1]:.0%} of {copy_bandwidth / 1e9:.0f} GB/s",
        ratio=other / mine, share=share[0], share_of_torch=share[1],
    )  # fmt: skip


@pytest.mark.parametrize(("sequences", "tokens"), PREFILLS)
def benchmark_prefill(
    sequences: int, tokens: int, benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole prompts. Half of the scores are in the future and are not counted as work."""
    pools = pools_of([(tokens, tokens)] * sequences, page_size=16)
    runs = [ours(pools), theirs(pools)]
    for run in runs:
        assert_parity(run, pools)
    mine, other = benchmark.pedantic(gpu_seconds, args=(runs,), rounds=1)
    work = 2 * sequences * HEADS * tokens * (tokens + 1) * HEAD_DIM
    tell(
        capsys, benchmark,
        f"{mine * 1e3:.3f} ms against {other * 1e3:.3f} ms, ratio {other / mine:.2f}; "
        f"{work / mine / 1e12:.0f} and {work / other / 1e12:.0f} TFLOP/s",
        ratio=other / mine, tflops=work / mine / 1e12,
    )  # fmt: skip
