"""Long prompts among streams, and short ones behind long ones: what those who wait notice.

`JACKFIELD_BENCH_SHORT` is the number of short requests (500). On a machine that is busy with other
things take `JACKFIELD_BENCH_CLOCK=processor OMP_NUM_THREADS=1`: seconds of the process alone, for
the engine, too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from workload import CLOCK

import jackfield
from jackfield import Engine

SHORT = int(os.environ.get("JACKFIELD_BENCH_SHORT", "500"))
#: What the engine is loaded with; a bound that is named is kept, whatever a step takes.
PACED: dict[str, dict[str, Any]] = {
    "named": {"max_batch_tokens": 2048},
    "paced": {},
}
PAGED = "paged?prefix_sharing=false"


def llama(width: int, layers: int) -> PreTrainedModel:
    """Random weights, and a context of 16k."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64,
        max_position_embeddings=16384, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # type: ignore[no-any-return]


def prompt(length: int, number: int = 0) -> list[int]:
    return [(7 * number + 13 * at * at) % 4093 + 1 for at in range(length)]


class Stream:
    """A request that is read token by token."""

    def __init__(self, engine: Engine, text: list[int], new: int) -> None:
        self.text = text
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.begin = CLOCK()
        self.task = asyncio.create_task(self._read(engine.astream(text, max_new_tokens=new)))

    async def _read(self, deltas: Any) -> None:
        async for delta in deltas:
            self.times += [CLOCK()] * len(delta.token_ids)
            self.tokens += delta.token_ids

    @property
    def first(self) -> float:
        return self.times[0] - self.begin

    def gaps(self, begin: float, end: float) -> list[float]:
        inside = [t for t in self.times if begin <= t <= end]
        return [after - before for before, after in itertools.pairwise(inside)]


async def streams_beside(engine: Engine, length: int) -> tuple[dict[str, float], list[Stream]]:
    """Eight streams, and 60 tokens later a prompt of `length`."""
    streams = [Stream(engine, prompt(40, n), 2000) for n in range(8)]
    while min(len(stream.times) for stream in streams) < 60:
        await asyncio.sleep(0.05)
    begin, spent = CLOCK(), time.process_time()
    long = Stream(engine, prompt(length), 1)
    await long.task
    spent = time.process_time() - spent
    end = CLOCK()
    for stream in streams:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
    alone = [gap for s in streams for gap in s.gaps(0.0, begin)]
    beside = [gap for s in streams for gap in s.gaps(begin - 0.1, end)]
    found = {
        "median gap alone": statistics.median(alone),
        "worst gap alone": max(alone),
        "median gap": statistics.median(beside),
        "worst gap": max(beside),
        "first token of the prompt": long.first,
        "processor time": spent,
    }
    return found, [*streams, long]


async def short_behind_long(engine: Engine) -> tuple[dict[str, float], list[Stream]]:
    """Five prompts of 8k, and short ones right behind them."""
    long = [Stream(engine, prompt(8192, n), 8) for n in range(5)]
    short = [Stream(engine, prompt(8 + n % 17, n), 8) for n in range(SHORT)]
    await asyncio.gather(*(one.task for one in (*long, *short)))
    firsts = [one.first for one in short]
    found = {
        "median first token of the short ones": statistics.median(firsts),
        "worst": max(firsts),
        "first of the long ones": min(one.first for one in long),
        "last of the long ones": max(one.first for one in long),
    }
    return found, [*long, *short]


def report(engine: Engine, run: Any, capsys: Any, checked: slice) -> None:
    """Print what `run` found; every text is what it is alone, as far as it was read."""
    begin = CLOCK()
    found, streams = asyncio.run(run)
    took = CLOCK() - begin
    for stream in streams[checked]:
        (alone,) = engine.generate(stream.text, max_new_tokens=len(stream.tokens))
        assert alone.token_ids == stream.tokens
    with capsys.disabled():
        shown = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in found.items())
        print(f"\n{shown}, all in {took:.1f} s")  # noqa: T201 - the figures are what this is for


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    """4 million parameters."""
    return llama(256, 4)


@pytest.fixture(scope="module")
def large() -> PreTrainedModel:
    """30 million parameters."""
    return llama(512, 8)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("pace", PACED)
def benchmark_streams(large: Any, length: int, pace: str, benchmark: Any, capsys: Any) -> None:
    with jackfield.load(large, cache_implementation=PAGED, **PACED[pace]) as engine:
        engine._loop.clock = CLOCK
        engine.generate(prompt(64), max_new_tokens=4)
        run = streams_beside(engine, length)
        benchmark.pedantic(lambda: report(engine, run, capsys, slice(6, None)), rounds=1)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("places", [32, 64])
@pytest.mark.parametrize("scheduler", ["fifo", "short-first"])
@pytest.mark.parametrize("pace", PACED)
def benchmark_short(
    small: Any, pace: str, scheduler: str, places: int, benchmark: Any, capsys: Any
) -> None:
    options = {"cache_implementation": PAGED, "scheduler": scheduler, "max_batch_size": places}
    options |= PACED[pace]
    with jackfield.load(small, **options) as engine:
        engine._loop.clock = CLOCK
        engine.generate(prompt(64), max_new_tokens=4)
        run = short_behind_long(engine)
        benchmark.pedantic(lambda: report(engine, run, capsys, slice(4, 40)), rounds=1)
