"""Cache `paged` against `dynamic` under the same loop: same weights, same tokens, in turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import jackfield

ROWS = {"one-row": ([64], 64), "16-ragged-rows": ([16 + 14 * i for i in range(16)], 32)}


@pytest.mark.parametrize("rows", ROWS)
def benchmark_paged(rows: str, alternate: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        initializer_range=0.1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    lengths, new = ROWS[rows]
    prompts = [torch.randint(5, 400, (n,)).tolist() for n in lengths]
    with (
        jackfield.load(model, cache_implementation="paged") as paged,
        jackfield.load(copy.deepcopy(model), cache_implementation="dynamic") as dynamic,
    ):

        def run(engine: jackfield.Engine) -> Any:
            return lambda: [c.token_ids for c in engine.generate(prompts, max_new_tokens=new)]

        alternate(run(paged), run(dynamic), len(lengths) * new, rounds=7)
