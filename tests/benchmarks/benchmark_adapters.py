"""Eight adapters in one batch: against one for all, against none, and one adapter after another.

The half-billion configuration in float32, 32 requests of 16 and 32 tokens, LoRAs of rank 16 on
every linear layer of attention and MLP. Each row says what its solo run with its adapter says.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from workload import half_billion

import jackfield
from jackfield.bridge.adapters import hushed

REQUESTS, NEW, ROUNDS = 32, 32, 3
NAMES = [f"adapter {number}" for number in range(8)]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def model() -> Any:
    return half_billion(torch.float32)


@pytest.fixture(scope="module")
def adapters(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in NAMES:
        path = found[name] = tmp_path_factory.mktemp("adapter")
        config = peft.LoraConfig(
            r=16, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        with hushed():
            wrapped = peft.get_peft_model(model, config)
            wrapped.save_pretrained(path, save_embedding_layers=False)
            wrapped.unload()
    return found


@pytest.mark.timeout(0)
def benchmark_eight_adapters(model: Any, adapters: Any, benchmark: Any, capsys: Any) -> None:
    drawn = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 151_000, (REQUESTS, 16), generator=drawn).tolist()
    mine = [NAMES[number % len(NAMES)] for number in range(REQUESTS)]
    seconds: dict[str, list[float]] = {}
    said: dict[str, list[list[int]]] = {}
    with jackfield.load(
        model, adapters=adapters, cache_implementation="paged?prefix_sharing=false"
    ) as engine:

        def ask(rows: list[int], names: list[str | None]) -> list[list[int]]:
            found = engine.generate(
                [prompts[row] for row in rows],
                settings=[{"adapter": name} for name in names],
                max_new_tokens=NEW,
            )
            return [one.token_ids for one in found]

        def in_turn() -> list[list[int]]:
            outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
            for name in NAMES:
                rows = [row for row in range(REQUESTS) if mine[row] == name]
                for row, one in zip(rows, ask(rows, [name] * len(rows)), strict=True):
                    outputs[row] = one
            return outputs

        every = list(range(REQUESTS))
        runs = {
            "eight adapters": lambda: ask(every, list(mine)),
            "one adapter": lambda: ask(every, [NAMES[0]] * REQUESTS),
            "none": lambda: ask(every, [None] * REQUESTS),
            "eight in turn": in_turn,
        }

        def once() -> None:
            for name, run in runs.items():
                start = time.perf_counter()
                said[name] = run()
                seconds.setdefault(name, []).append(time.perf_counter() - start)

        benchmark.pedantic(once, rounds=ROUNDS, warmup_rounds=1)
        alone = [ask([row], [mine[row]])[0] for row in range(0, REQUESTS, 4)]
    with capsys.disabled():
        for name in runs:
            pairs = zip(seconds["eight adapters"][1:], seconds[name][1:], strict=True)
            ratios = sorted(theirs / ours for ours, theirs in pairs)
            print(  # noqa: T201 - the figures are what this is for
                f"\n{name}: {REQUESTS * NEW / statistics.median(seconds[name][1:]):.1f} tokens/s, "
                f"{statistics.median(ratios):.2f} times the time of eight in one batch "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                end="",
            )
    assert said["eight adapters"][::4] == alone
    assert said["eight adapters"] != said["none"]
