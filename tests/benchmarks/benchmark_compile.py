"""Compiled steps against uncompiled ones and against transformers' `generate`, in turn.

And what compiling takes: in a process that finds nothing on disk, and in the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from workload import Load, Outputs, load_of, regret

import jackfield
from jackfield.demo import MODEL_PATH

NEW = 48
ROUNDS = 5
ENGINES = {
    f"{cache}, {compiler}": {"cache_implementation": cache, "compile": compiler}
    for cache in ("static", "paged")
    for compiler in ("none", "inductor")
}


def demo() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every contender makes as many tokens
    return model  # type: ignore[no-any-return]


def hundred_million() -> PreTrainedModel:
    """A Llama of 12 layers and 110 million parameters, with random weights."""
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"demo": demo, "110M": hundred_million}


def requests(rows: int, vocab_size: int) -> Load:
    """Prompts of one model's own vocabulary, all with as many new tokens."""
    load = load_of(rows, NEW)
    prompts = [[token % (vocab_size - 10) + 5 for token in prompt[:64]] for prompt in load.prompts]
    return Load(prompts, [NEW] * rows)


def generate(model: PreTrainedModel, load: Load) -> Outputs:
    width = max(map(len, load.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in load.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in load.prompts])
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return found[:, width:].tolist()  # type: ignore[no-any-return]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def benchmark_compiled_decode(name: str, rows: int, benchmark: Any, capsys: Any) -> None:
    make = MODELS[name]
    plain = make()
    load = requests(rows, plain.config.vocab_size)
    with contextlib.ExitStack() as stack:
        runs: dict[str, Callable[[], Outputs]] = {"generate": lambda: generate(plain, load)}
        for label, arguments in ENGINES.items():
            engine = stack.enter_context(jackfield.load(make(), **arguments))

            def ours(engine: Any = engine) -> Outputs:
                return [c.token_ids for c in engine.generate(load.prompts, max_new_tokens=NEW)]

            runs[label] = ours
        outputs = {label: run() for label, run in runs.items()}  # compiles
        seconds: dict[str, list[float]] = {label: [] for label in runs}

        def in_turn() -> None:
            for label, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[label].append(time.perf_counter() - start)

        benchmark.pedantic(in_turn, rounds=ROUNDS)
    for label, found in outputs.items():
        assert regret(plain, load, found) < 1e-3, label
    with capsys.disabled():
        for label, mine in seconds.items():
            ratios = sorted(b / a for a, b in zip(mine, seconds["generate"], strict=True))
            print(  # noqa: T201 - the figures are what this is for
                f"\n{name}, {rows} rows, {label}: {load.tokens / statistics.median(mine):.1f} "
                f"tokens/s, {statistics.median(ratios):.2f} times generate "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                end="",
            )


FRESH = """
import json, sys
sys.path[:0] = sys.argv[3:]
import jackfield
from benchmark_compile import MODELS, requests
model = MODELS[sys.argv[1]]()
load = requests(1, model.config.vocab_size)
with jackfield.load(model, cache_implementation=sys.argv[2], compile="inductor") as engine:
    engine.generate(load.prompts, max_new_tokens=4)
    print(json.dumps(engine.report().to_dict()["compiler"]["compiled"]))
"""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MODELS)
def benchmark_compile_seconds(name: str, benchmark: Any, capsys: Any, tmp_path: Path) -> None:
    """The graph of one decoding sequence, by `paged`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    here = str(Path(__file__).parent)
    took: list[float] = []

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", FRESH, name, "paged", here],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        made = json.loads(done.stdout.splitlines()[-1])
        assert made["graphs"] == 1
        took.append(made["seconds"])

    benchmark.pedantic(run, rounds=3)
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{name}: {took[0]:.1f} s to compile, {statistics.median(took[1:]):.1f} s in the "
            "next process"
        )
