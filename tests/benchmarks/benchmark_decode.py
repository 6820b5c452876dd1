"""Decode speed of the loop against `transformers.generate`: same weights, same tokens, in turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import jackfield
from jackfield.demo import MODEL_PATH

PROMPT, NEW = 32, 64


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
    found.generation_config.pad_token_id = 0
    return found.eval()


@pytest.mark.parametrize("batch", [1, 8])
def benchmark_decode(model: PreTrainedModel, batch: int, alternate: Any) -> None:
    torch.manual_seed(batch)
    ids = torch.randint(5, 400, (batch, PROMPT))
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    with jackfield.load(model, attn_implementation="sdpa") as engine:

        def ours() -> list[list[int]]:
            return [c.token_ids for c in engine.generate(ids.tolist(), max_new_tokens=NEW)]

        def theirs() -> list[list[int]]:
            mask = torch.ones_like(ids)
            out = plain.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            return out[:, PROMPT:].tolist()

        alternate(ours, theirs, batch * NEW)
