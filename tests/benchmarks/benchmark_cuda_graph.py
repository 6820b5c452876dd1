"""Recorded steps on a GPU: how much of its memory's bandwidth one decoding sequence uses.

Every token reads all weights once, so bandwidth / bytes of weights is the limit in tokens a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from workload import Load, Outputs, regret

import jackfield
from jackfield.bridge.bandwidth import measure_bandwidth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

NEW = 128
ROUNDS = 5
REGRET = 0.5  # by how much a logit of bfloat16 may be below the best one
DEVICE = "cuda"
EIGHT_BILLION = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    bos_token_id=None,
    eos_token_id=None,
)
ENGINES = {
    f"{cache}, {compiler}": {"cache_implementation": cache, "compile": compiler}
    for cache in (f"static?max_cache_len={NEW + 64}", "paged")
    for compiler in ("none", "cuda_graph")
}


def random_model(config: LlamaConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.timeout(0)
def benchmark_eight_billion(benchmark: Any, capsys: Any) -> None:
    model = random_model(EIGHT_BILLION)
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    limit = measure_bandwidth(DEVICE) / weights
    load = Load([list(range(5, 37))], [NEW])
    ids = torch.tensor(load.prompts, device=DEVICE)

    def generate() -> Outputs:
        return model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 32:].tolist()  # type: ignore[no-any-return]

    seconds: dict[str, list[float]] = {"generate": []}
    assert regret(model, load, generate()) < REGRET
    for label, arguments in ENGINES.items():  # one after the other, as all use the same weights
        with jackfield.load(model, attn_implementation="sdpa", **arguments) as engine:

            def ours(engine: jackfield.Engine = engine) -> Outputs:
                return [c.token_ids for c in engine.generate(load.prompts, max_new_tokens=NEW)]

            found = ours()
            seconds[label] = [timed(ours) for _ in range(ROUNDS)]
        assert regret(model, load, found) < REGRET, label
        seconds["generate"] += [timed(generate) for _ in range(ROUNDS)]
    benchmark.pedantic(generate, rounds=1)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, the limit is {limit:.0f} tokens/s")  # noqa: T201
        base = statistics.median(seconds["generate"])
        for label, found in seconds.items():
            took = statistics.median(found)
            print(  # noqa: T201 - the figures are what this is for
                f"{label}: {NEW / took:.1f} tokens/s, {NEW / took / limit:.0%} of the limit, "
                f"{base / took:.2f} times generate"
            )


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
