"""Cache `paged` against `dynamic` under the same loop: same weights, same tokens, in turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import jackfield
from jackfield.demo import MODEL_PATH

ROWS = {"one-row": ([64], 64), "16-ragged-rows": ([16 + 14 * i for i in range(16)], 32)}


@pytest.fixture(scope="module", params=["demo", "llama-100m"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "demo":
        found = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            initializer_range=0.1,
        )
        found = AutoModelForCausalLM.from_config(config)
    found.generation_config.eos_token_id = None
    return found.eval()


@pytest.mark.parametrize("rows", ROWS)
def benchmark_paged(model: PreTrainedModel, rows: str, alternate: Any) -> None:
    torch.manual_seed(0)
    lengths, new = ROWS[rows]
    prompts = [torch.randint(5, 400, (n,)).tolist() for n in lengths]
    with (
        jackfield.load(model, attn_implementation="sdpa", cache_implementation="paged") as paged,
        jackfield.load(copy.deepcopy(model), cache_implementation="dynamic") as dynamic,
    ):

        def run(engine: jackfield.Engine) -> Any:
            return lambda: [c.token_ids for c in engine.generate(prompts, max_new_tokens=new)]

        alternate(run(paged), run(dynamic), len(lengths) * new, rounds=11)
