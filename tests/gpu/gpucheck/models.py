"""Models with random weights, which are drawn where they stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel


def random_model(sizes: Mapping[str, Any], device: str, dtype: str) -> PreTrainedModel:
    """Always the same weights; with these every token of a text depends on the ones before."""
    config = LlamaConfig(**sizes, initializer_range=0.04)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    model.generation_config.pad_token_id = 0
    return model.eval()  # type: ignore[no-any-return]


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, always the same."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, vocab_size, (count, length), generator=generator).tolist()  # type: ignore[no-any-return]


def read_bytes(model: PreTrainedModel) -> int:
    """What one token has to read of the weights: all but the rows of other tokens."""
    embeddings = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - embeddings.nbytes
