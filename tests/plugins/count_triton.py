"""Run steps of a model's life through the Triton attention with a driver that runs nothing.

Prints what was compiled at load and after it, as JSON. Run by a test in a process of its own, as
Triton decides when it is imported whether to interpret.
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from fake_triton import FakeDriver, Launch

from jackfield.contracts import PackedLayer, PackedStep, PageTables, Requirements, Span
from jackfield_plugins.attention.triton.launch import PagedAttention
from jackfield_plugins.attention.triton.warming import compile_ahead
from jackfield_plugins.kernel.rms_norm import Meaning
from jackfield_plugins.kernel.triton_rms_norm.launch import rms_norm

HEADS, KV_HEADS, SIZE, PAGE, WINDOW = 6, 2, 72, 32, 1000
NEEDS = Requirements(
    architecture="Tiny", dtype="bfloat16", device="cuda",
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dims=(SIZE,),
    layer_types=("full_attention", "sliding_attention"), windows=(None, WINDOW),
    packed_numbers=(2 * KV_HEADS * SIZE,) * 2,
)  # fmt: skip
driver = FakeDriver().install()
splits: set[int] = set()  # into how many parts keys were split
POOL = torch.zeros(2, PAGE, KV_HEADS, SIZE, dtype=torch.bfloat16)


def layer_of(sizes: list[tuple[int, int]], window: int | None) -> PackedLayer:
    """(queries, tokens with these) of each sequence, all of whose pages are page 0."""
    starts = [0]
    for queries, _ in sizes:
        starts.append(starts[-1] + queries)
    spans = [Span(at, queries, end) for at, (queries, end) in zip(starts, sizes, strict=False)]
    step = PackedStep(
        spans, torch.tensor(starts).int(), torch.tensor([end for _, end in sizes]).int(),
        max(queries for queries, _ in sizes), max(end for _, end in sizes),
    )  # fmt: skip
    firsts = [0 if window is None else max(0, s.kv_len - window) // PAGE * PAGE for s in spans]
    counts = [-(-(s.kv_len - first) // PAGE) for s, first in zip(spans, firsts, strict=True)]
    table = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    tables = [[0] * count for count in counts]
    held = PageTables(step, window, PAGE, table, torch.tensor(firsts).int(), tables, firsts)
    return PackedLayer(POOL, POOL, held)


def life(seed: int) -> list[list[tuple[int, int]]]:
    """One sequence that decodes to 4,096, then batches of 1 to 64 with chunks and drafts."""
    draw = random.Random(seed)
    steps = [[(1, end)] for end in range(1, 4097, 3)]
    for batch in range(1, 65):
        steps.append([(1, draw.randint(1, 4096)) for _ in range(batch)])
        chunks = [draw.choice((1, 2, 7, 16, 17, 33, 255, 512, 1021)) for _ in range(batch)]
        steps.append([(n, n + draw.choice((0, 1, 16, 999))) for n in chunks])
        drafts = [draw.randint(1, 9) for _ in range(batch)]
        steps.append([(n, n + draw.randint(0, 300)) for n in drafts])
    return steps


def queries(tokens: int, odd: bool) -> torch.Tensor:
    """Where a model hands them over, also at an address that is no multiple of 16."""
    room = torch.zeros(tokens * HEADS * SIZE + 1, dtype=torch.bfloat16)
    return room[int(odd) :][: tokens * HEADS * SIZE].view(tokens, HEADS, SIZE)


def check(launches: list[Launch], sizes: list[tuple[int, int]]) -> None:
    """Every sequence is in one launch, and each grid covers what is left to it."""
    by_name = {launch.name: launch for launch in launches}
    assert len(by_name) == len(launches)
    decode, prefill = by_name.get("paged_decode"), by_name.get("paged_prefill")
    short = decode.arguments["QUERIES"] if decode is not None else 0
    longer = [n for n, _ in sizes if n > short]
    assert (prefill is not None) == bool(longer)
    assert (decode is not None) == (len(longer) < len(sizes))
    if prefill is not None:
        assert prefill.arguments["short"] == short
        each = prefill.arguments["BLOCK_M"] // prefill.arguments["CHUNK"]
        assert (prefill.grid[0] - 1) * each < max(longer) <= prefill.grid[0] * each
        assert prefill.grid[1:] == (KV_HEADS, len(sizes))
    if decode is not None:
        assert decode.grid[:2] == (KV_HEADS, len(sizes))
        assert ("sum_splits" in by_name) == (decode.grid[2] > 1)
        splits.add(decode.grid[2])


def norms() -> None:
    """Rows of several counts and strides, also at addresses that are no multiple of 16."""
    weight, meaning = torch.ones(72), Meaning(1e-6, 0, rounds_first=True)
    for count in (1, 2, 16, 33, 512):
        room = torch.zeros(count * 80 + 1, dtype=torch.bfloat16)
        for rows in (room[:-1].view(count, 80)[:, :72], room[1:][: count * 72].view(count, 72)):
            driver.launches.clear()
            rms_norm(rows, weight, meaning)
            (launch,) = driver.launches
            assert launch.grid == (count, 1, 1)


def main() -> None:
    attention = PagedAttention()
    context: Any = SimpleNamespace(
        requirements=NEEDS, model=object(), device=torch.device("cpu")
    )  # fmt: skip
    compile_ahead(attention, context, PAGE)
    at_load = driver.counts()
    loose = {
        name: sorted(kernel.fixed.keys() - kernel.declared) + sorted(
            kernel.aligned - {"query", "keys", "values", "out", "parts"}
        )
        for name, kernel in driver.compiled
    }  # fmt: skip
    for number, sizes in enumerate(life(seed=0)):
        for window in (None, WINDOW):
            driver.launches.clear()
            layer = layer_of(sizes, window)
            tokens = sum(n for n, _ in sizes)
            attention(queries(tokens, number % 5 == 0), layer, scaling=0.1)
            check(driver.launches, sizes)
    norms()
    answer = {
        "at_load": at_load, "in_all": driver.counts(), "loose": loose, "splits": sorted(splits)
    }  # fmt: skip
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
