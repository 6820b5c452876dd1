"""Fused layers against the model's own, in turn."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from jackfield_plugins.kernel.cpu_rms_norm.call import rms_norm_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 8, 128])
def benchmark_cpu_rms_norm(dtype: torch.dtype, rows: int, benchmark: Any, capsys: Any) -> None:
    norm = LlamaRMSNorm(896).to(dtype)
    given = torch.randn(1, rows, 896, dtype=dtype)
    fused, ratios, times = rms_norm_of(norm), [], []

    def seconds(function: Any) -> float:
        start = time.perf_counter()
        for _ in range(200):
            function(given)
        return (time.perf_counter() - start) / 200

    def in_turn() -> None:
        own, new = seconds(norm), seconds(fused)
        ratios.append(own / new)
        times.append(new)

    with torch.inference_mode():
        benchmark.pedantic(in_turn, rounds=15, warmup_rounds=2)
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{rows} rows, {dtype}: {statistics.median(ratios):.1f} times as fast as its own, "
            f"{statistics.median(times) * 1e6:.1f} µs a call"
        )
