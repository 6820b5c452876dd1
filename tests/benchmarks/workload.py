"""The load that batching is measured with: a model, and prompts as long as maths questions."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

#: `JACKFIELD_BENCH_CLOCK=processor` counts the processor's time, which other work on the machine
#: hardly stretches; set `OMP_NUM_THREADS=1` with it, as threads that wait for each other count too.
CLOCK = (
    time.process_time
    if os.environ.get("JACKFIELD_BENCH_CLOCK") == "processor"
    else time.perf_counter
)


def half_billion(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Qwen2.5-0.5B's configuration with random weights."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=0.05,
        use_sliding_window=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Load:
    """Prompts of 40 to 250 tokens, and how many new tokens each one gets."""

    prompts: list[list[int]]
    new: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.new)


def load_of(requests: int, most_new: int) -> Load:
    chance = random.Random(0)
    return Load(
        [[chance.randrange(1000) for _ in range(chance.randint(40, 250))] for _ in range(requests)],
        [chance.randint(most_new // 4, most_new) for _ in range(requests)],
    )


def regret(model: PreTrainedModel, load: Load, outputs: list[list[int]], sampled: int = 4) -> float:
    """By how much, at most, a chosen token's logit is below the best one, in float32.

    Rounding lets greedy paths of two programs part in bfloat16; each token must still be the best
    one as far as bfloat16 can tell. `model` is in float32.
    """
    worst = 0.0
    for prompt, new in list(zip(load.prompts, outputs, strict=True))[:sampled]:
        ids = torch.tensor([prompt + new], device=model.device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(new) + 1).logits[0, :-1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((logits.max(-1).values - chosen).max()))
    return worst


Outputs = list[list[int]]


def settings_of(load: Load) -> list[dict[str, Any]]:
    return [{"max_new_tokens": count} for count in load.new]
